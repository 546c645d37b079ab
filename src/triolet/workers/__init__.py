"""Programs that run in child processes of the engine."""
