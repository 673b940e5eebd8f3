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


_FIRST_PAUSE_S: Final = 2.0
_MAX_TRIES: Final = 7
"""The pause doubles: the last try comes about two minutes after the first."""


@dataclass(slots=True, eq=False)
class _Release:
    consumer: Callable[[], str | None]
    params: dict[str, Any]
    done: Callable[[bool], None]
    tries: int = 0


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
    """Releases in the background; what cannot be done is tried again, then left to its deadline."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        self._queue: asyncio.Queue[_Release] = asyncio.Queue(_MAX_WAITING)
        self._later: dict[_Release, asyncio.TimerHandle] = {}

    def soon(
        self,
        consumer: Callable[[], str | None],
        params: dict[str, Any],
        done: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Release ``params`` through the engine whose URL ``consumer`` gives when it is time.

        The consumer is an engine of the other role: it notifies the one that holds the blocks.
        ``done`` is told after each try whether the engine took it.
        """
        self._put(_Release(consumer, params, done))

    def hurry(self) -> None:
        """Do not wait any longer before trying again."""
        for release in [*self._later]:
            self._again(release)

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
                if outcome in ("no_engine", "failed"):
                    self._plan_again(release)
                self._queue.task_done()

    def _put(self, release: _Release) -> None:
        try:
            self._queue.put_nowait(release)
        except asyncio.QueueFull:
            self._metrics.releases.labels(outcome="queue_full").inc()
            release.done(False)

    def _plan_again(self, release: _Release) -> None:
        """No engine could be asked: one may come back."""
        release.tries += 1
        if release.tries < _MAX_TRIES:
            pause_s = _FIRST_PAUSE_S * 2 ** (release.tries - 1)
            loop = asyncio.get_running_loop()
            self._later[release] = loop.call_later(pause_s, self._again, release)

    def _again(self, release: _Release) -> None:
        self._later.pop(release).cancel()
        self._put(release)

    async def _release(self, url: str | None, params: dict[str, Any]) -> str:
        if url is None:
            return "no_engine"
        try:
            body = release_body(params)
            reply = await self._client.post(url, "/v1/completions", body, {}, timeout_s=_TIMEOUT_S)
        except ValueError as error:
            logger.warning("blocks are left to their deadline: %s", error)
            return "unreleasable"
        except EngineError as error:
            logger.info("blocks are not given back yet: %s", error)
            return "failed"
        if reply.status != 404:
            logger.warning("engine %s answered %d to a release, not 404", url, reply.status)
            return "unexpected"
        return "released"
