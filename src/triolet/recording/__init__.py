"""File of an engine's requests and answers, written by a thread while it serves."""
