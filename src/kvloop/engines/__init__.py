"""Talking to vLLM: the HTTP client, what each engine is and how it is, releases."""
