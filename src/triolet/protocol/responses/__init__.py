"""The Responses protocol: sessions, turns, responses and their items."""
