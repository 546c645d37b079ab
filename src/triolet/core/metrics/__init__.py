"""Statistics and trace spans of steps and requests, as values."""
