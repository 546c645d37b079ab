"""`triolet run-batch`: a file of requests, answered by an engine in this process."""
