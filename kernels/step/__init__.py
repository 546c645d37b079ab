"""Kernels around a model's layers: the rows' state on the device, a step's inputs from it, and a token for each row.

They read lengths and row numbers from memory only, so that a captured graph of them goes on being right. Each stands
beside a reference in torch, which may read what it likes.
"""
