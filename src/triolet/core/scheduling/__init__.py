"""Which tokens the next step computes."""
