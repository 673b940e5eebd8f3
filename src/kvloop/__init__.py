"""kvloop closes the KV-cache loop between prefill and decode nodes of disaggregated vLLM."""

__version__ = "0.1.0"
