"""The store of KV references between turns.

Pure: no I/O; the time is passed in by whoever has a clock.
"""
