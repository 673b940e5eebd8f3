"""Give streamed answers the KV reference that vLLM up to 0.32 gives only to non-streamed ones.

When a request's ``kv_transfer_params`` ask for it, one event is added right before
``data: [DONE]``::

    data: {"object":"kvloop.stream_reference","kv_transfer_params":{...},"token_ids":[...]}

It is an event of its own, so the router takes it out whole and every other byte of the stream is
the engine's. It also carries the generated ids, which the router needs for its proof and which
would otherwise have to be requested in every chunk. vLLM from 0.33 sends the reference itself, on
the chunk with ``finish_reason``; there the event carries the ids only.
"""

from __future__ import annotations

import inspect
import json
import logging
from functools import wraps
from typing import TYPE_CHECKING, Any

from kvloop.wire import KV_PARAMS, STREAM_REFERENCE_ASK, STREAM_REFERENCE_OBJECT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

logger = logging.getLogger("vllm.kvloop")

DONE_EVENT = "data: [DONE]\n\n"


def patch_chat(module: Any) -> None:
    """Wrap the chat stream generator of vLLM's chat serving module."""
    native = KV_PARAMS in module.ChatCompletionStreamResponse.model_fields
    _patch(module.OpenAIServingChat, "chat_completion_stream_generator", native=native)


def patch_completions(module: Any) -> None:
    """Wrap the stream generator of vLLM's completions serving module."""
    native = KV_PARAMS in module.CompletionStreamResponse.model_fields
    _patch(module.OpenAIServingCompletion, "completion_stream_generator", native=native)


class _Observed:
    """What one request produced: its generated ids and, at its end, D's reference."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.kv_transfer_params: dict[str, Any] | None = None

    async def watch(self, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Pass the engine's results on, untouched, remembering what the event needs."""
        async for item in results:
            # Completions yield (prompt index, result), chat yields the result.
            result = item[1] if isinstance(item, tuple) else item
            for output in result.outputs:
                self.token_ids.extend(output.token_ids)
            if result.kv_transfer_params is not None:
                self.kv_transfer_params = result.kv_transfer_params
            yield item

    def event(self, *, native: bool) -> str:
        body: dict[str, Any] = {"object": STREAM_REFERENCE_OBJECT}
        if not native:
            body[KV_PARAMS] = self.kv_transfer_params
        body["token_ids"] = self.token_ids
        return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _patch(serving: type, method: str, *, native: bool) -> None:
    original: Callable[..., AsyncGenerator[str, None]] = getattr(serving, method)
    signature = inspect.signature(original)
    if not {"request", "result_generator"} <= signature.parameters.keys():
        # A vLLM we do not know: the stream still works, and the router says what is missing.
        logger.error(
            "kvloop: %s.%s has other parameters than expected (%s); streamed turns will not be "
            "reused. Use a vLLM version from kvloop's compatibility table.",
            serving.__name__,
            method,
            signature,
        )
        return

    @wraps(original)
    def with_reference(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        bound = signature.bind(*args, **kwargs)
        if not _is_asked(bound.arguments["request"]):
            return original(*args, **kwargs)
        observed = _Observed()
        bound.arguments["result_generator"] = observed.watch(bound.arguments["result_generator"])
        return _with_event(original(*bound.args, **bound.kwargs), observed, native=native)

    setattr(serving, method, with_reference)
    logger.info("kvloop: streams of %s can carry KV references", serving.__name__)


def _is_asked(request: Any) -> bool:
    """Several sequences share one set of blocks on P but have one reference each: not ours."""
    params = request.kv_transfer_params
    return (
        isinstance(params, dict)
        and bool(params.get(STREAM_REFERENCE_ASK))
        and (request.n or 1) == 1
    )


async def _with_event(
    events: AsyncGenerator[str, None], observed: _Observed, *, native: bool
) -> AsyncGenerator[str, None]:
    try:
        async for event in events:
            if event == DONE_EVENT:
                yield observed.event(native=native)
            yield event
    finally:
        # A client that leaves closes us; vLLM's generator must hear of it at once, not at GC.
        await events.aclose()
