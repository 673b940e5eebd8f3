"""One generation request over HTTP: the knobs' mischief, the engine, the answer or the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

from tests.double import answers, transfer
from tests.double.answers import CHAT, Choice
from tests.double.engine import Engine, HangError, OutOfBlocksError, RefusedError, Sequence
from tests.double.exchange import Exchange, Whole
from tests.double.fabric import InvalidError
from tests.double.prompts import chat_prompt, completion_prompts, given_ids, media_of


async def answer(
    engine: Engine, exchange: Exchange, body: dict[str, Any], kind: str
) -> Whole | None:
    """vLLM's answer; None if it was streamed. Raises RefusedError for an error."""
    params = body.get("kv_transfer_params")
    try:
        if await _misbehaves(engine, exchange):
            return None
        prompts = _checked(engine, body, params, kind)
    except (RefusedError, asyncio.CancelledError):
        transfer.reject(engine, params)
        raise
    if body.get("stream"):
        await _stream(engine, exchange, body, prompts, kind)
        return None
    choices: list[Choice] = []
    try:
        await _begin(engine, body, prompts, choices)
        async for _ in _generate(engine, choices):
            pass
    except RefusedError:
        _abort(choices)
        transfer.reject(engine, params)  # vLLM cleans up after errors of the engine as well
        raise
    except asyncio.CancelledError:
        _abandon(engine, choices, params)
        raise
    return Whole(200, answers.compact(answers.whole(body, choices, kind)))


def check_model(engine: Engine, body: dict[str, Any]) -> None:
    """404 for a model that is not served; none named is fine."""
    name = body.get("model")
    if name and name != engine.model and name not in engine.adapters:
        message = f"The model `{name}` does not exist. Valid aliases: {engine.model}."
        raise RefusedError(404, message, "model")


def max_tokens(engine: Engine, body: dict[str, Any]) -> int:
    return int(
        body.get("max_completion_tokens") or body.get("max_tokens") or engine.default_max_tokens
    )


async def _misbehaves(engine: Engine, exchange: Exchange) -> bool:
    """What the knobs do before anything is looked at; True if the connection is gone."""
    if engine.hold is not None:
        await engine.hold.wait()
    if engine.answer_delay_s:
        await asyncio.sleep(engine.answer_delay_s)
    if engine.break_next:
        engine.break_next -= 1
        exchange.break_off()
        return True
    return False


def _checked(engine: Engine, body: dict[str, Any], params: Any, kind: str) -> list[list[int]]:
    """Prompts of a request that the API server lets through."""
    check_model(engine, body)
    if engine.refuse_next:
        raise RefusedError(engine.refuse_next.pop(0), "refused by the test")
    if params is not None and not isinstance(params, dict):
        raise InvalidError("Input should be a valid dictionary", "kv_transfer_params")
    if body.get("stream_options") and not body.get("stream"):
        raise RefusedError(400, "Stream options can only be defined when `stream=True`.")
    if (body.get("n") or 1) > 1 and body.get("temperature") == 0:
        raise RefusedError(400, "n must be 1 when using greedy sampling")
    if not params and _extra(body) is not None:
        engine.die()  # unchecked on this way in: on_new_request asks it for its keys
    ids = given_ids(params, body) if kind == CHAT else None
    if ids is not None and not engine.ignores_ids:
        prompts = [ids]
    else:
        prompts = [chat_prompt(engine, body)] if kind == CHAT else completion_prompts(body)
    if max(map(len, prompts)) + max_tokens(engine, body) > engine.max_model_len:
        message = f"This model's maximum context length is {engine.max_model_len} tokens."
        raise RefusedError(400, message, "input_tokens")
    return prompts


def _extra(body: dict[str, Any]) -> Any:
    """vLLM takes these fields, lists and strings, where the request has no transfer fields."""
    return (body.get("vllm_xargs") or {}).get("kv_transfer_params")


async def _begin(
    engine: Engine, body: dict[str, Any], prompts: list[list[int]], choices: list[Choice]
) -> None:
    wanted = [prompt for prompt in prompts for _ in range(body.get("n") or 1)]
    # Here a request's sequences begin together; two such must not wait for each other's memory.
    async with engine.several if len(wanted) > 1 else nullcontext():
        for prompt in wanted:
            sequence = await _scheduled(engine, body, prompt)
            choices.append(Choice(len(choices), sequence, body))


async def _scheduled(engine: Engine, body: dict[str, Any], prompt: list[int]) -> Sequence:
    """Wait for memory, as vLLM does; D's heartbeats keep P's blocks meanwhile."""
    params, name = body.get("kv_transfer_params"), body.get("model")
    engine.num_waiting += 1
    try:
        async with asyncio.timeout(engine.memory_timeout_s):
            while True:
                try:
                    return engine.begin(
                        prompt,
                        max_tokens(engine, body),
                        params,
                        body.get("cache_salt") or "",
                        adapter=name if name in engine.adapters else "",
                        media="".join(media_of(body)),
                        ignore_eos=bool(body.get("ignore_eos")),
                        stop_token_ids=frozenset(body.get("stop_token_ids") or ()),
                    )
                except OutOfBlocksError:
                    transfer.heartbeat(engine, params)
                    await asyncio.sleep(engine.poll_s)
                except HangError:
                    await asyncio.Event().wait()
    except TimeoutError as error:
        raise RefusedError(503, "no KV block became free in time") from error
    finally:
        engine.num_waiting -= 1


async def _generate(
    engine: Engine, choices: list[Choice]
) -> AsyncIterator[tuple[Choice, answers.Delta]]:
    """Tokens, one of each sequence in turn, as fast as the knobs let them."""
    while any(choice.finish_reason is None for choice in choices):
        for choice in choices:
            if choice.finish_reason is None:
                if engine.token_delay_s:
                    await asyncio.sleep(engine.token_delay_s)
                if engine.token_gate is not None:
                    await engine.token_gate.acquire()
                yield choice, choice.advance()


def _abort(choices: list[Choice]) -> None:
    for choice in choices:
        choice.sequence.abort()


def _abandon(engine: Engine, choices: list[Choice], params: Any) -> None:
    """The client is gone: an abort; of what was not scheduled yet, the producer hears."""
    engine.disconnects += 1
    _abort(choices)
    if not choices:
        transfer.reject(engine, params)


async def _stream(
    engine: Engine,
    exchange: Exchange,
    body: dict[str, Any],
    prompts: list[list[int]],
    kind: str,
) -> None:
    await exchange.begin()
    choices: list[Choice] = []
    number, unsent = 0, b""
    try:
        async for event in _events(engine, body, prompts, choices, kind):
            if number == engine.pause_stream_after:
                await asyncio.Event().wait()  # only its reader's leaving ends it
            if number == engine.break_stream_after:
                _abort(choices)
                exchange.break_off()
                return
            number, unsent = number + 1, unsent + event.encode()
            if number % engine.merge_events == 0:
                await _send(engine, exchange, unsent)
                unsent = b""
        await _send(engine, exchange, unsent)
    except (asyncio.CancelledError, ConnectionError):
        _abandon(engine, choices, body.get("kv_transfer_params"))
        raise
    await exchange.end()


async def _send(engine: Engine, exchange: Exchange, data: bytes) -> None:
    if data:
        for piece in engine.cut_stream(data):
            await exchange.write(piece)


async def _events(
    engine: Engine,
    body: dict[str, Any],
    prompts: list[list[int]],
    choices: list[Choice],
    kind: str,
) -> AsyncIterator[str]:
    native = engine.native_stream_reference
    try:
        await _begin(engine, body, prompts, choices)
        opened = kind != CHAT
        async for choice, delta in _generate(engine, choices):
            if not opened:
                for one in choices:
                    yield answers.opening_event(body, one)
                opened = True
            said = answers.token_event(body, choice, delta, kind, native=native)
            if said is not None:
                yield said
        if (body.get("stream_options") or {}).get("include_usage"):
            yield answers.usage_event(kind, body, choices)
    except RefusedError as refused:  # the headers are out: the error comes as an event
        _abort(choices)
        yield f"data: {answers.compact(answers.error_body(refused.status, str(refused)))}\n\n"
    params = body.get("kv_transfer_params")
    asks = isinstance(params, dict) and params.get("kvloop_stream_reference")
    if engine.plugin and asks and (body.get("n") or 1) == 1:
        yield answers.reference_event(choices[0] if choices else None, native=native)
    yield answers.DONE
