"""The engine that a caller holds: its scope, its streams, and the admission and end of requests."""
