"""From sampled tokens to the outputs that a caller reads."""
