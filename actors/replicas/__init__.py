"""Replicas of an engine that come, go, and stay away."""
