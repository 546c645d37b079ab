"""Counts and spans of steps and requests, as values."""
