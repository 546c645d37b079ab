"""Engines for programs without Trio: the engine runs in a thread of its own, and its streams cross over."""
