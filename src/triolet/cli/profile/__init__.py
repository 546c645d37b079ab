"""`triolet profile`: where the time of a model's steps goes."""
