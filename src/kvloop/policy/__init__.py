"""Routes and what they cost: pure functions of a snapshot.

No I/O, no clock, no engine client. The router and the simulator run the same code.
"""
