"""Keeps the fleet's picture of each engine true: health, facts, restarts.

One task per engine, all owned by :func:`watch`. What a restart means for references is decided by
whoever is called back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvloop.engines.client import EngineError, EngineTimeoutError
from kvloop.engines.facts import EngineFacts, read_facts, read_load, started_s
from kvloop.engines.fleet import Engine, Fleet, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloop.engines.client import EngineClient

logger = logging.getLogger("kvloop.engines")

_PROBE_TIMEOUT_S = 5.0
_MAX_LATE_PROBES = 4
"""An engine that is busy answers late; one that hangs does so again and again."""
_UNUSABLE_INTERVAL_S = 0.5
"""Clients are refused until an engine that is back has been seen."""
_RENDER_PATH = "/v1/completions/render"


class _NotAnEngineError(Exception):
    """It answers, but not like a healthy vLLM engine."""


async def watch(
    fleet: Fleet,
    client: EngineClient,
    *,
    interval_s: float,
    on_usable: Callable[[Engine, bool], None],
    on_seen: Callable[[Engine], None] = lambda _: None,
) -> None:
    """Probe every engine every ``interval_s`` seconds (sooner if unusable) until cancelled.

    ``on_usable`` is called when an engine has become usable, with whether it is another process
    than before: whoever keeps references then knows that those are gone. ``on_seen`` is called
    after every look at a usable engine, its load being news.
    """
    async with asyncio.TaskGroup() as group:
        for engine in fleet.engines:
            group.create_task(_watch_one(engine, client, interval_s, on_usable, on_seen))


async def probe(engine: Engine, client: EngineClient) -> bool:
    """Look at one engine once and note what is seen; returns whether it was restarted."""
    try:
        facts = await _look(engine, client)
    except EngineTimeoutError as error:
        engine.late_probes += 1
        if engine.usable and engine.late_probes < _MAX_LATE_PROBES:
            logger.info("%s: taken for busy (%d)", error, engine.late_probes)
            return False
        return _lost(engine, error)
    except (EngineError, _NotAnEngineError, ValueError) as error:
        return _lost(engine, error)
    if not engine.usable:
        logger.info("%s node %s is usable: %s", engine.role.value, engine.url, _summary(facts))
    return engine.seen(facts)


def _lost(engine: Engine, error: Exception) -> bool:
    if engine.trouble != str(error):
        logger.warning("%s node %s is not usable: %s", engine.role.value, engine.url, error)
    engine.lost(str(error))
    return False


async def _watch_one(
    engine: Engine,
    client: EngineClient,
    interval_s: float,
    on_usable: Callable[[Engine, bool], None],
    on_seen: Callable[[Engine], None],
) -> None:
    while True:
        was_usable = engine.usable
        restarted = await probe(engine, client)
        if restarted:
            logger.warning("%s node %s was restarted", engine.role.value, engine.url)
        if restarted or (engine.usable and not was_usable):
            on_usable(engine, restarted)
        if engine.usable:
            on_seen(engine)
        await asyncio.sleep(interval_s if engine.usable else min(interval_s, _UNUSABLE_INTERVAL_S))


async def _look(engine: Engine, client: EngineClient) -> EngineFacts:
    health = await client.get(engine.url, "/health", timeout_s=_PROBE_TIMEOUT_S)
    if health.status != 200:
        raise _NotAnEngineError(f"/health answered {health.status}")
    if engine.role is Role.RENDER:
        return EngineFacts(0.0, 0, 0, prefix_caching=False, renders=True)
    metrics = await client.get(engine.url, "/metrics", timeout_s=_PROBE_TIMEOUT_S)
    if metrics.status != 200:
        raise _NotAnEngineError(f"/metrics answered {metrics.status}")
    engine.load = read_load(metrics.body)
    if engine.facts is not None and engine.facts.started_s == started_s(metrics.body):
        return engine.facts
    models = await client.get(engine.url, "/v1/models", timeout_s=_PROBE_TIMEOUT_S)
    if models.status != 200:
        raise _NotAnEngineError(f"/v1/models answered {models.status}")
    version = await client.get(engine.url, "/version", timeout_s=_PROBE_TIMEOUT_S)
    renders = await _renders(engine, client)
    return read_facts(metrics.body, models.body, version.body, renders=renders)


async def _renders(engine: Engine, client: EngineClient) -> bool:
    """Whether the render endpoints are open: vLLM answers 403 (or 404) where they are not."""
    reply = await client.post(engine.url, _RENDER_PATH, b"{}", {}, timeout_s=_PROBE_TIMEOUT_S)
    return reply.status not in (403, 404, 405)


def _summary(facts: EngineFacts) -> str:
    return (
        f"block size {facts.block_size}, KV cache {facts.kv_capacity_tokens} tokens, "
        f"prefix cache {'on' if facts.prefix_caching else 'off'}, "
        f"render {'yes' if facts.renders else 'no'}, "
        f"plugin {'yes' if facts.has_plugin else 'no'}"
    )
