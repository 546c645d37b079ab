"""What is asked of the engine: prompt, parameters, limits, and the checks that hold them."""
