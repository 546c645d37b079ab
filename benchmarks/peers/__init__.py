"""Other engines, measured beside triolet: each in a process of its own, under the Python that has it installed."""
