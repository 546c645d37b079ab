"""Families with recurrent layers: their configuration, their tensors, and the parsers of their config.json."""
