"""The claim protocol (docs/claims.md): asking a holder, by block hash, for KV that it has now.

Everything here but :mod:`.endpoint` is pure; nothing imports vLLM.
"""
