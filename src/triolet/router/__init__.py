"""Front of a fleet: one address for many engines, whose streams go on when an engine dies."""
