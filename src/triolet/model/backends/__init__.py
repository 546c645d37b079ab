"""Implementations of the forward pass: torch, one C++ call, or the modelling code of transformers."""
