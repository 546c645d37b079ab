"""Trio loops around the decisions of the core, and the supervision tree over them."""
