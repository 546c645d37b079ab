"""Backends of the chat: an engine in this process, or a server."""
