"""Tokenizers of model folders."""
