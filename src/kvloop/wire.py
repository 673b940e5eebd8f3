"""Names that kvloop, its plugin and vLLM use on the wire: the one place that spells them.

Constants and plain data only. Imported by the router and, inside vLLM, by the plugin; so nothing
may be imported here but the standard library.
"""

from typing import Any, Final

# --- vLLM's own -------------------------------------------------------------------------------

KV_PARAMS: Final = "kv_transfer_params"
PROMPT_TOKEN_IDS: Final = "prompt_token_ids"  # noqa: S105
"""Inside ``kv_transfer_params`` of a chat request: use these ids, do not render the messages."""

REMOTE_BLOCK_IDS: Final = "remote_block_ids"
REMOTE_NUM_TOKENS: Final = "remote_num_tokens"
REMOTE_ENGINE_ID: Final = "remote_engine_id"
REMOTE_EXPIRY_TIME: Final = "remote_blocks_expiry_time"
REMOTE_CACHED_TOKENS: Final = "remote_prefill_cached_tokens"

REFERENCE_FIELDS: Final = (
    REMOTE_ENGINE_ID,
    "remote_request_id",
    "remote_host",
    "remote_port",
    REMOTE_BLOCK_IDS,
    REMOTE_NUM_TOKENS,
)
"""Without one of these vLLM ignores a reference or, worse, trips over it (pull_scheduler.py)."""


def cold_prefill_params() -> dict[str, Any]:
    """What makes an engine keep a prompt's KV for the decode node that will read it."""
    return {"do_remote_decode": True, "do_remote_prefill": False}


# --- between the router and kvloop's plugin ---------------------------------------------------

STREAM_REFERENCE_ASK: Final = "kvloop_stream_reference"
"""Key in ``kv_transfer_params`` by which the router asks the plugin for a reference event."""

STREAM_REFERENCE_OBJECT: Final = "kvloop.stream_reference"
"""``object`` of the event that the plugin adds before ``data: [DONE]``."""

ENGINE_INFO_METRIC: Final = "kvloop:engine_info"
"""Gauge in the engine's ``/metrics`` whose labels say what the plugin knows of the engine."""

CLAIM_HOLDERS: Final = "kvloop_claim_holders"
"""Key in ``kv_transfer_params``: ``[host, claim port]`` of engines to ask, best first."""

CLAIM_REPORT: Final = "kvloop_claim"
"""Key in P's answer: what became of its claim, see :func:`claim_report`."""

CLAIM_CONNECTOR: Final = "KVLoopConnector"

CLAIM_REQUEST_PREFIX: Final = "kvloop-claim:"
"""Begins the request id under which NIXL reads what was claimed."""

CLAIM_PORT_OFFSET: Final = 1000
"""From an engine's NIXL side channel to its claim port, unless configured."""


def claim_report(asked_tokens: int, granted_tokens: int, why: str) -> dict[str, Any]:
    """Tokens that P asked a holder for, tokens that it was granted and read; why not more."""
    return {"asked_tokens": asked_tokens, "granted_tokens": granted_tokens, "why": why}
