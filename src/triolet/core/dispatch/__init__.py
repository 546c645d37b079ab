"""Dispatch: decides which of several replicas computes a request."""
