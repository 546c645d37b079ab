"""Metrics, traces and log lines, made from the values of the core."""
