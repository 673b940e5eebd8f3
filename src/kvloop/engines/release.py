"""Give blocks back before their deadline, on stock vLLM.

vLLM tells the producer to free a request's blocks when the consumer rejects the request before
scheduling it (`_with_kv_transfer_rejection_cleanup`). So a completion for a model that does not
exist, carrying the reference, frees the blocks: no compute, no block, answered 404 at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvloop.engines.client import EngineError
from kvloop.wire import KV_PARAMS, REFERENCE_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloop.engines.client import EngineClient
    from kvloop.observe.metrics import Metrics

logger = logging.getLogger("kvloop.release")

NO_SUCH_MODEL: Final = "kvloop-releases-kv-blocks"
_TIMEOUT_S: Final = 5.0
_MAX_WAITING: Final = 65_536
_WORKERS: Final = 8
"""Releases at once: an engine that answers late must not keep the others waiting."""


@dataclass(frozen=True, slots=True)
class _Release:
    consumer: Callable[[], str | None]
    params: dict[str, Any]
    done: Callable[[bool], None]


def release_body(params: dict[str, Any]) -> bytes:
    """The request that makes an engine tell ``params``'s producer to free its blocks.

    Raises ValueError when a field is missing: vLLM's engine would die of it.
    """
    missing = [field for field in REFERENCE_FIELDS if params.get(field) in (None, "", [])]
    if missing:
        raise ValueError(f"cannot release a reference without {', '.join(missing)}")
    return msgspec.json.encode(
        {
            "model": NO_SUCH_MODEL,
            "prompt": [0],
            "max_tokens": 1,
            KV_PARAMS: {**params, "do_remote_prefill": True, "do_remote_decode": False},
        }
    )


class Releases:
    """Releases in the background; what cannot be done is left to its deadline."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        self._queue: asyncio.Queue[_Release] = asyncio.Queue(_MAX_WAITING)

    def soon(
        self,
        consumer: Callable[[], str | None],
        params: dict[str, Any],
        done: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Release ``params`` through the engine whose URL ``consumer`` gives when it is time.

        The consumer is an engine of the other role: it notifies the one that holds the blocks.
        ``done`` is told whether the engine took it.
        """
        try:
            self._queue.put_nowait(_Release(consumer, params, done))
        except asyncio.QueueFull:
            self._metrics.releases.labels(outcome="queue_full").inc()
            done(False)

    async def run(self) -> None:
        """Work the queue until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_WORKERS):
                group.create_task(self._work())

    async def settle(self) -> None:
        """Wait until everything queued so far was worked on."""
        await self._queue.join()

    async def _work(self) -> None:
        while True:
            release = await self._queue.get()
            outcome = "cancelled"
            try:
                outcome = await self._release(release.consumer(), release.params)
            finally:
                self._metrics.releases.labels(outcome=outcome).inc()
                release.done(outcome == "released")
                self._queue.task_done()

    async def _release(self, url: str | None, params: dict[str, Any]) -> str:
        if url is None:
            return "no_engine"
        try:
            body = release_body(params)
            reply = await self._client.post(url, "/v1/completions", body, {}, timeout_s=_TIMEOUT_S)
        except (EngineError, ValueError) as error:
            logger.info("blocks are left to their deadline: %s", error)
            return "failed"
        if reply.status != 404:
            logger.warning("engine %s answered %d to a release, not 404", url, reply.status)
            return "unexpected"
        return "released"
