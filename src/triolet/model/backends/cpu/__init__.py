"""The native decoder on a CPU: one call into C++ for a whole step."""
