"""What is decided after a failure: restarts, poison bisection, smaller steps."""
