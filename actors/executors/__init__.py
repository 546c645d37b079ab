"""How a step plan is executed: inline, in a thread, or in a process."""
