"""The engine, its streams, and the way a request enters and leaves."""
