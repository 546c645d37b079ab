"""JSON of clients: parsed within limits, converted to classes, and written."""
