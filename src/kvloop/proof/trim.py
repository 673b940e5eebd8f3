"""Cut a KV reference down to the tokens that are proven.

vLLM's P allocates blocks for the tokens it lacks and takes *the last as many* of the reference's
list, comparing no tokens (nixl/base_worker.py, `_apply_prefix_caching`). A reference is right only
if its token count and every block list are cut to the same whole blocks.
"""

from __future__ import annotations

from typing import Any

from kvloop.proof.fingerprint import UNIT_TOKENS
from kvloop.wire import REFERENCE_FIELDS, REMOTE_BLOCK_IDS, REMOTE_NUM_TOKENS


def unusable_reason(params: Any, block_size: int) -> str | None:
    """Why a reference as D sent it must not be used at all; None if it may be trimmed.

    More than one KV cache group (sliding window, Mamba, hybrid) and decode context parallelism
    shape the lists in ways that a prefix cut does not respect (`get_exchange_clipped_blocks`).
    """
    if not isinstance(params, dict):
        return "not_an_object"
    if any(params.get(field) in (None, "", []) for field in REFERENCE_FIELDS):
        return "missing_field"
    groups = params[REMOTE_BLOCK_IDS]
    num_tokens = params[REMOTE_NUM_TOKENS]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        return "malformed_blocks"
    if not isinstance(num_tokens, int) or num_tokens <= 0:
        return "malformed_num_tokens"
    if len(groups) != 1:
        return "several_kv_cache_groups"
    if (params.get("dcp_size") or 1) != 1:
        return "decode_context_parallel"
    if block_size <= 0 or block_size % UNIT_TOKENS:
        return "block_size"
    if len(groups[0]) * block_size < num_tokens:
        return "fewer_blocks_than_tokens"
    return None


def reusable_tokens(common: int, retained: int, prompt: int, block_size: int) -> int:
    """Tokens that may be attached: whole blocks, proven, retained, and leaving one to compute.

    ``common``: tokens proven equal; ``retained``: tokens whose KV D holds; ``prompt``: this
    prompt's tokens. The last prompt token is always computed: its logits start the answer.
    """
    usable = min(common, retained, prompt - 1)
    return max(0, usable) // block_size * block_size


def trim(params: dict[str, Any], num_tokens: int, block_size: int) -> dict[str, Any]:
    """The reference for its first ``num_tokens`` tokens (whole blocks); other fields as they came.

    Raises ValueError for a count that is no whole number of blocks or more than the reference has.
    """
    (blocks,) = params[REMOTE_BLOCK_IDS]
    num_blocks, rest = divmod(num_tokens, block_size)
    if rest or not 0 < num_blocks <= len(blocks) or num_tokens > params[REMOTE_NUM_TOKENS]:
        raise ValueError(
            f"cannot trim a reference of {params[REMOTE_NUM_TOKENS]} tokens in {len(blocks)} "
            f"blocks of {block_size} to {num_tokens} tokens"
        )
    return {**params, REMOTE_BLOCK_IDS: [blocks[:num_blocks]], REMOTE_NUM_TOKENS: num_tokens}
