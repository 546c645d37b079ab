"""Scheduling policies, one per file; `registry` names them."""
