"""Messages between the engine and its child processes, as bytes: pure, no clock, no file, no torch.

`frames` cuts a stream of bytes into frames, `messages` says which values a frame may hold, `failures` carries an
exception across.
"""
