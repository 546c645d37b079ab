"""KV tensors and the memory under them."""
