"""Transport: the listener, HTTP through hypercorn, and WebSocket frames."""
