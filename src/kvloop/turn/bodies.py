"""The bodies that go to the engines: the client's fields, less what a leg must own.

Pure functions from a request to bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvloop.turn.request import Api
from kvloop.wire import KV_PARAMS, PROMPT_TOKEN_IDS, STREAM_REFERENCE_ASK, cold_prefill_params

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvloop.turn.request import TurnRequest

PREFILL_OWNS: Final = frozenset(
    {
        # how much and how it is answered: P gives one token that nobody sees
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "best_of",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_prompt_text",
        # a stop string that P's one token happens to be would end it as an abort: no blocks
        "stop",
    }
)

PREFILL_OWNS_WITH_IDS: Final = frozenset({"tool_choice", "response_format", "structured_outputs"})
"""Constrain a token that nobody sees; they shape the prompt only where P renders it itself."""


class PromptIds:
    """A prompt's token ids, encoded once for all the bodies that carry them."""

    __slots__ = ("ids", "raw")

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.raw = msgspec.Raw(msgspec.json.encode(ids))

    def __len__(self) -> int:
        return len(self.ids)


def render_body(request: TurnRequest) -> bytes:
    """Asks an engine for the prompt's token ids."""
    return msgspec.json.encode(request.body)


def prefill_body(
    request: TurnRequest,
    prompt: PromptIds | None,
    reuse: dict[str, Any] | None,
    more: Mapping[str, Any] | None = None,
) -> bytes:
    """P's request: compute the prompt, keep its KV.

    ``reuse``: what tells P where it may read some of it, a reference or holders to ask. ``more``:
    fields that the router wants for itself.
    """
    owned = PREFILL_OWNS if prompt is None else PREFILL_OWNS | PREFILL_OWNS_WITH_IDS
    body = {name: value for name, value in request.body.items() if name not in owned}
    body["max_tokens"] = 1
    if "max_completion_tokens" in request.body:
        body["max_completion_tokens"] = 1
    body["stream"] = False
    body |= more or {}
    if prompt is not None and body.get("tools"):
        body["tool_choice"] = "none"  # vLLM's default for tools, "auto", needs a parser on P
    params = {**(reuse or {}), **cold_prefill_params()}
    return _encode(request, body, params, prompt)


def decode_body(
    request: TurnRequest, prompt: PromptIds | None, prefilled: dict[str, Any] | None
) -> bytes:
    """D's request: the client's own, with P's blocks to read (none: D computes by itself)."""
    body = dict(request.body)
    if prefilled is None:
        return msgspec.json.encode(body)
    params = dict(prefilled)
    if request.streamed:
        params[STREAM_REFERENCE_ASK] = True
    else:
        body["return_token_ids"] = True
    return _encode(request, body, params, prompt)


def _encode(
    request: TurnRequest, body: dict[str, Any], params: dict[str, Any], prompt: PromptIds | None
) -> bytes:
    if prompt is not None:
        if request.api is Api.CHAT:
            params[PROMPT_TOKEN_IDS] = prompt.raw
        else:
            body["prompt"] = prompt.raw
    body[KV_PARAMS] = params
    return msgspec.json.encode(body)
