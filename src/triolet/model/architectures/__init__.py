"""Families of decoders as data: their configuration, weights and rotary embeddings."""
