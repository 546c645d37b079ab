"""Steps on a GPU: the device holds the rows, the host sends what changes and reads one small array back.

    plan -> host table (checked) -> packet, one copy -> writes, inputs, layers, sampling: one graph -> results, one copy

The parts: `packet` makes the array of a plan, `device_rows` knows what the tables on the device hold, `graphs` captures
steps, and `steps` puts them together. `step_device` is all that they need of a driver, so that tests can put another in
its place.
"""
