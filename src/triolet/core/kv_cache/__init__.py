"""Block ids, their states, and which blocks hold a known prefix."""
