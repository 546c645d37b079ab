"""The command `triolet replay`."""
