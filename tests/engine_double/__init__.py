"""A stand-in for a vLLM engine that is fast and semantically honest.

Its "KV" is a hash chain of the tokens that produced it and its answers are a function of the KV
that a request really attends to: a wrong attach changes the answer, as in life.
"""
