"""`triolet doctor`: what this machine has for triolet, what triolet chose of it, and what stands in its way."""
