"""What vLLM's classes do beside answering: sleep, weights, caches, adapters, calls into workers, profiles and logs."""
