"""`triolet bench serve`: load of a server from outside, and what its clients wait for."""
