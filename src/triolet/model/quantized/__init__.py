"""Quantised model folders: GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes; read as float32 or as kept blocks."""
