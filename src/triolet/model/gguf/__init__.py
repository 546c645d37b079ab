"""GGUF files: from their bytes to configuration, tensors and tokenizer."""
