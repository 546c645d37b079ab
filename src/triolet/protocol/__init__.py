"""PURE. Bodies and events of the HTTP and WebSocket interfaces, without a socket."""
