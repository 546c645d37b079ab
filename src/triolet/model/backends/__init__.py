"""What computes a forward pass: torch, one C++ call, or the modelling code of transformers."""
