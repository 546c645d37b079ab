"""Grammars that answers must follow, through llguidance; compiled in processes that can be killed.

`lark_source` says what a `StructuredOutputsParams` means, `compiler` follows answers through a grammar, and
`triolet.workers.grammar` is the process around both. Nothing here knows of Trio or torch.
"""
