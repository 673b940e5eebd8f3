"""What vLLM's engines do at the HTTP surface, as one script that runs on them and on the double.

``python -m tests.contract`` runs it on the double and compares with what real vLLM was recorded to
do; ``--engines`` runs it on real engines, ``--record`` writes down what those do.
"""
