"""Responses service: WebSocket sessions, active and resumable responses, and the snapshot file."""
