"""Routes of pooled requests: embeddings and classification."""
