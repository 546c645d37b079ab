"""Replicas of one engine: which of them computes a request, and what follows from the death of one."""
