"""Configuration of the engine and of the server: fields with defaults, units and reasons."""
