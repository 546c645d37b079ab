"""Weights, KV tensors, sampling and `ModelRunner.execute(plan)`; torch, and no Trio."""
