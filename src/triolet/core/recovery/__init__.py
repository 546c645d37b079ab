"""Decisions after a failure: restarts, poison bisection, smaller steps."""
