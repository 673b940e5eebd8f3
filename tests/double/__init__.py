"""A stand-in for a vLLM engine that is fast and semantically honest.

Its "KV" is a hash chain of the tokens that produced it and its answers are a function of the KV
that a request really attends to: a wrong attach changes the answer, as in life. What it does is
what vLLM 0.32 was seen or read to do; what of that a router must survive has a knob on
:class:`tests.double.engine.Engine`.
"""
