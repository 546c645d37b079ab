"""Models as things: presets, the models on this machine, and those of a running server."""
