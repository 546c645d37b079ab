"""Grammars that answers must follow, through llguidance: what is compiled here runs in processes that can be killed.

`source` says what a `StructuredOutputsParams` means, `matcher` follows answers through a grammar, and `program` is the
process around both. Nothing here knows of Trio or torch.
"""
