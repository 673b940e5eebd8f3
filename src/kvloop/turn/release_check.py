"""Whether a decode node frees blocks that are released without a read.

Early release stands on a clean-up path of vLLM (:mod:`kvloop.engines.release`) that no version
promises. So each life of each D is tried once, while it is idle: one small prompt goes through P
and D, its pin is released, and D's own metrics must show the blocks coming back. Where they do
not, the account leaves every pin to its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvloop.engines.client import EngineError
from kvloop.engines.facts import read_load
from kvloop.engines.release import release_body
from kvloop.ledger.pins import PinState
from kvloop.proof.trim import unusable_reason
from kvloop.turn.accounting import account_pin
from kvloop.turn.releasing import release, release_prefilled
from kvloop.wire import KV_PARAMS, cold_prefill_params

if TYPE_CHECKING:
    from kvloop.engines.client import EngineClient
    from kvloop.engines.facts import EngineLoad
    from kvloop.engines.fleet import Engine
    from kvloop.turn.services import Services

logger = logging.getLogger("kvloop.release")

_PATH: Final = "/v1/completions"
_TIMEOUT_S: Final = 60.0
_POLLS: Final = 20
_POLL_S: Final = 0.25


class _CannotTellError(Exception):
    """The engines are busy, or did not do what the check needs."""


async def frees_on_release(prefill: Engine, decode: Engine, services: Services) -> bool | None:
    """True or False as D showed it; None if this was no time to tell."""
    try:
        return await _try(prefill, decode, services)
    except (EngineError, _CannotTellError, ValueError, msgspec.MsgspecError) as error:
        logger.info("cannot tell whether %s frees released blocks: %s", decode.url, error)
        return None


async def _try(prefill: Engine, decode: Engine, services: Services) -> bool:
    client = services.client
    before = await _idle_load(decode, client)
    salt = secrets.token_hex(8)  # nobody's prefix cache entries are used or left behind
    prefilled = await _leg(prefill, client, cold_prefill_params(), salt, decode)
    try:
        pinned = await _leg(decode, client, prefilled, salt, decode)
    except BaseException:
        release_prefilled(prefilled, services)
        raise
    pin_id = account_pin(pinned, decode, services).pin_id
    try:
        frees = await _shows_release(pinned, before, prefill, decode, client)
    except BaseException:
        release(pin_id, decode.url, pinned, services)
        raise
    if frees:
        services.pins.gone(pin_id)
    else:
        services.pins.move(pin_id, PinState.STUCK)
    return frees


async def _shows_release(
    pinned: dict[str, Any],
    before: EngineLoad,
    prefill: Engine,
    decode: Engine,
    client: EngineClient,
) -> bool:
    unusable = unusable_reason(pinned, decode.facts.block_size if decode.facts else 0)
    if unusable is not None:
        raise _CannotTellError(f"its reference is not usable ({unusable})")
    held = await _idle_load(decode, client)
    if held.kv_usage <= before.kv_usage:
        raise _CannotTellError("its metrics do not show the pin")
    body = release_body(pinned)
    reply = await client.post(prefill.url, _PATH, body, {}, timeout_s=_TIMEOUT_S)
    if reply.status != 404:  # it went wrong before D could hear of it
        raise _CannotTellError(f"{prefill.url} answered {reply.status} to the release")
    for _ in range(_POLLS):
        if (await _idle_load(decode, client)).kv_usage < held.kv_usage:
            return True
        await asyncio.sleep(_POLL_S)
    return False


async def _leg(
    engine: Engine, client: EngineClient, params: dict[str, Any], salt: str, decode: Engine
) -> dict[str, Any]:
    if engine.facts is None or decode.facts is None:
        raise _CannotTellError("it is not usable")
    body = {
        "model": next(iter(decode.facts.model_names), None),
        "prompt": "kvloop " * decode.facts.block_size,
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": salt,
        KV_PARAMS: params,
    }
    reply = await client.post(
        engine.url, _PATH, msgspec.json.encode(body), {}, timeout_s=_TIMEOUT_S
    )
    if reply.status != 200:
        raise _CannotTellError(f"{engine.url} answered {reply.status}")
    answer = msgspec.json.decode(reply.body, type=dict[str, Any])
    given = answer.get(KV_PARAMS)
    if not isinstance(given, dict):
        raise _CannotTellError(f"{engine.url} gave no reference")
    return given


async def _idle_load(decode: Engine, client: EngineClient) -> EngineLoad:
    """Its load. Raises _CannotTellError unless nothing else moves its KV usage."""
    reply = await client.get(decode.url, "/metrics", timeout_s=_TIMEOUT_S)
    load = read_load(reply.body)
    if load.running or load.waiting:
        raise _CannotTellError("it is busy")
    return load
