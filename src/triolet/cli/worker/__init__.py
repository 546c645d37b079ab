"""`triolet worker`: a worker of an engine on another machine."""
