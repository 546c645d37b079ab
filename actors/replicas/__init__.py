"""Replicas of an engine whose number changes."""
