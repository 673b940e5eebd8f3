"""What two token sequences provably share, and how a reference is cut down to it.

Pure: no I/O, no clock. A claim made here is the only thing that lets KV be attached to a prompt.
"""
