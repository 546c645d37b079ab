"""A request to the engine: prompt, parameters, limits, and the checks on them."""
