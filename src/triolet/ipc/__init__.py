"""What the engine and the runner's process say to each other, as bytes: pure, no clock, no file, no torch.

`frames` cuts a stream of bytes into frames, `messages` says which values a frame may hold, `failures` carries an
exception across.
"""
