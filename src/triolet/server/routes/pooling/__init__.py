"""Routes of pooled requests: embeddings."""
