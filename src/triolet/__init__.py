"""triolet: an LLM inference engine built as actors on Trio structured concurrency."""
