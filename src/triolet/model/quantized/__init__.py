"""Quantised model folders of GPTQ, AWQ, compressed-tensors and other tools; read as float32 or as kept blocks."""
