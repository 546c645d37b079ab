"""Quantised checkpoints in model folders: GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes, read as float32."""
