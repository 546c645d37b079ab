"""Model runners on other machines, which connect to the engine over TCP."""
