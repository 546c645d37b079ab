"""The Responses service: sessions over WebSocket, answers that can be resumed."""
