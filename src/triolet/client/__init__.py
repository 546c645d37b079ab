"""Client of an OpenAI-compatible server: its address, HTTP and WebSocket."""
