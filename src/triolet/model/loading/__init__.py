"""Loading: from the name of a model to a runner that computes its steps."""
