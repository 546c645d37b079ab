"""PURE. Decisions of the engine: values in, values out; no Trio, no torch, no clock."""
