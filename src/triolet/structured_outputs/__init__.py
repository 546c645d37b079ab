"""Structured outputs: grammars compiled with llguidance, in processes that can be killed.

`lark_source` translates a `StructuredOutputsParams`, `compiler` computes token masks, `triolet.workers.grammar` runs
both in a process. Neither Trio nor torch is used here.
"""
