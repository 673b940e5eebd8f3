"""The router: its services, its endpoints for clients and for operators, what lives as long."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvloop.engines.client import HttpEngineClient
from kvloop.engines.fleet import Fleet, Role
from kvloop.engines.gate import Gate
from kvloop.engines.monitor import watch
from kvloop.engines.pairs import Pairs
from kvloop.engines.release import Releases
from kvloop.gateway import openapi
from kvloop.gateway.admission import Admission
from kvloop.gateway.connection import Limits
from kvloop.gateway.counters import Counters
from kvloop.gateway.identity import Callers
from kvloop.gateway.keys import KeyFile
from kvloop.gateway.operators import Operators
from kvloop.gateway.status import Status, limits
from kvloop.gateway.turns import Turns, wait_for_body
from kvloop.ledger.deadline import DeadlineClock
from kvloop.ledger.memory import Ledger
from kvloop.ledger.pins import Pins
from kvloop.observe.metrics import Metrics
from kvloop.policy.pull_threshold import PullThreshold
from kvloop.proof.fingerprint import Fingerprinter
from kvloop.turn.canary import Canary
from kvloop.turn.filing import relieve
from kvloop.turn.orphans import Orphans
from kvloop.turn.release_check import frees_on_release
from kvloop.turn.releasing import release_claimed
from kvloop.turn.request import Api
from kvloop.turn.restarts import forget_earlier_life
from kvloop.turn.runner import TurnRunner
from kvloop.turn.services import Services, Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from kvloop.config import Settings
    from kvloop.engines.client import EngineClient
    from kvloop.engines.fleet import Engine

logger = logging.getLogger("kvloop.gateway")

_RELEASE_AT_SHUTDOWN_S = 5.0
_CUT_OFF_S = 5.0
"""For turns that are cancelled at shutdown to give back what they hold."""


class Router:
    """The services, and the two applications over them."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        client: EngineClient | None = None,
    ) -> None:
        """``clock``: monotonic seconds. ``client``: how engines are called; default: HTTP.

        Raises KeyFileError for a file of API keys that cannot be used.
        """
        self.settings = settings
        client = client or HttpEngineClient(settings.connect_timeout_s, settings.engine_api_key)
        metrics = Metrics()
        pairs = Pairs()
        secret = settings.fingerprint_secret.encode() or secrets.token_bytes(32)
        self.services = Services(
            fleet=Fleet.of(
                settings.prefill,
                settings.decode,
                settings.render,
                gate_of=lambda role: _gate(role, settings, clock),
            ),
            client=client,
            ledger=Ledger(settings.max_references, settings.max_ledger_bytes),
            pins=Pins(),
            pin_budget=settings.pin_budget,
            pairs=pairs,
            canary=Canary(settings.canary_share, settings.canary_tolerance, client, pairs, metrics),
            policy=PullThreshold(settings.threshold_tokens),
            fingerprinter=Fingerprinter(secret),
            deadlines=DeadlineClock(settings.kv_ttl_s, settings.deadline_margin_s),
            releases=Releases(client, metrics),
            orphans=Orphans(settings.orphan_grace_s, metrics),
            metrics=metrics,
            timeouts=Timeouts(
                queue_s=settings.queue_timeout_s,
                render_s=settings.render_timeout_s,
                prefill_s=settings.prefill_timeout_s,
                pull_s=settings.pull_timeout_s,
                first_byte_s=settings.first_byte_timeout_s,
                lease_s=settings.kv_lease_s,
                silence_s=settings.silence_timeout_s,
                decode_s=settings.decode_timeout_s,
            ),
            clock=clock,
        )
        self.counters = Counters(metrics.registry)
        self.admission = Admission(settings.max_turns, settings.max_turns_per_tenant)
        self.limits = self._limits()
        self._keys = KeyFile(Path(settings.api_keys), clock) if settings.api_keys else None
        self._callers = Callers(self._keys, settings.engine_api_key)
        self._status = Status(self.services, self._callers, self.admission, self.limits)
        self._said: set[str] = set()

    def application(self) -> web.Application:
        """What clients use; its lifetime is that of the connections to the engines."""
        app = web.Application(client_max_size=self.settings.max_body_bytes)
        runner = TurnRunner(self.services)
        turns = Turns(runner, self._callers, self.admission, self.counters, self.settings)
        for api in Api:
            app.router.add_post(api.value, turns.handler(api), expect_handler=wait_for_body)
        app.router.add_get("/v1/models", self._status.models)
        app.router.add_get("/health", self._status.health)
        app.router.add_get("/ready", self._status.ready)
        app.router.add_get("/openapi.json", openapi.serve)
        app.cleanup_ctx.append(self._lifetime)
        return app

    def admin_application(self) -> web.Application:
        """What operators use; never to be reached by clients."""
        app = web.Application()
        app.router.add_get("/health", self._status.health)
        app.router.add_get("/ready", self._status.ready_in_full)
        app.router.add_get("/engines", self._status.engines)
        app.router.add_get("/metrics", self._status.metrics)
        app.router.add_post("/pairs/reset", Operators(self.services.pairs).reset_pair)
        return app

    def admin_limits(self) -> Limits:
        """Operators' connections do not count among those of clients."""
        return self._limits()

    def _limits(self) -> Limits:
        return Limits(
            max_connections=self.settings.max_connections,
            request_timeout_s=self.settings.request_timeout_s,
            client_stall_timeout_s=self.settings.client_stall_timeout_s,
            counters=self.counters,
        )

    def reload_keys(self) -> None:
        """Read the file of API keys now, if there is one."""
        if self._keys is not None:
            self._keys.reload()

    async def drain(self) -> None:
        """Let in no more turns; wait for those that run, then cancel them."""
        await self.admission.drain(self.settings.drain_timeout_s, _CUT_OFF_S)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Connections and background work, for as long as turns are served."""
        jobs = [self._watch(), self.services.releases.run()]
        if self.settings.check_releases:
            jobs.append(self._check_releases())
        async with self.services.client, _background(*jobs):
            try:
                yield
            finally:
                await self.services.canary.close()
            await self._give_everything_back()

    async def _lifetime(self, _app: web.Application) -> AsyncGenerator[None]:
        async with self.running():
            yield

    async def _watch(self) -> None:
        await watch(
            self.services.fleet,
            self.services.client,
            interval_s=self.settings.probe_interval_s,
            on_usable=self._usable,
            on_seen=self._seen,
        )

    async def _check_releases(self) -> None:
        """Try each life of each decode node once; again later while it is too busy to tell."""
        fleet = self.services.fleet
        while True:
            for decode in fleet.decodes:
                prefill = next((engine for engine in fleet.prefills if engine.usable), None)
                if prefill is None or not decode.is_release_to_be_tried:
                    continue
                decode.release_checks += 1
                verdict = await frees_on_release(prefill, decode, self.services)
                decode.frees_on_release = verdict
                if verdict is False:
                    self._say_limits()
            await asyncio.sleep(self.settings.probe_interval_s)

    async def _give_everything_back(self) -> None:
        """Nobody will use the ledger's references any more; D need not pin them to the end."""
        try:
            async with asyncio.timeout(_RELEASE_AT_SHUTDOWN_S):
                await self.services.orphans.settle()
                release_claimed(self.services.ledger.drain(), "router_stops", self.services)
                self.services.releases.hurry()
                await self.services.releases.settle()
        except TimeoutError:
            logger.warning("not all blocks could be given back; they are left to their deadline")

    def _usable(self, engine: Engine, restarted: bool) -> None:
        if restarted and engine.facts is not None:
            forget_earlier_life(engine, engine.facts.plugin.get("engine_id"), self.services)
        if not self.services.fleet.missing():
            self._say_limits()

    def _seen(self, engine: Engine) -> None:
        if engine.role is Role.DECODE:
            relieve(engine, self.services, engine.load)

    def _say_limits(self) -> None:
        """Each limit once, when all that is needed to serve has been seen."""
        for limit in limits(self.services.fleet):
            if limit not in self._said:
                self._said.add(limit)
                logger.warning("%s", limit)


def _gate(role: Role, settings: Settings, clock: Callable[[], float]) -> Gate | None:
    """Rendering is quick and bounded by the turns that are being served."""
    if role is Role.RENDER:
        return None
    is_prefill = role is Role.PREFILL
    limit = settings.prefill_concurrency if is_prefill else settings.decode_concurrency
    return Gate(limit, settings.queue_limit, clock)


@asynccontextmanager
async def _background(*jobs: Any) -> AsyncGenerator[None]:
    """Run jobs for as long as the context; one that fails ends the router loudly."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
