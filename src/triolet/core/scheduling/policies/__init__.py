"""The order in which waiting requests are admitted, one policy per file."""
