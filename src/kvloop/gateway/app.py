"""The router as one aiohttp application: routes, error shapes, what lives as long as it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from kvloop.engines.breaker import BreakerState
from kvloop.engines.client import HttpEngineClient
from kvloop.engines.fleet import Fleet, Role
from kvloop.engines.gate import Gate
from kvloop.engines.monitor import watch
from kvloop.engines.pairs import Pairs
from kvloop.engines.release import Releases
from kvloop.gateway.errors import error_response
from kvloop.gateway.turns import turn_handler
from kvloop.ledger.deadline import DeadlineClock
from kvloop.ledger.memory import Ledger
from kvloop.ledger.pins import Pins, PinState
from kvloop.observe.metrics import Metrics
from kvloop.policy.pull_threshold import PullThreshold
from kvloop.proof.fingerprint import Fingerprinter
from kvloop.turn.filing import release_claimed, relieve
from kvloop.turn.orphans import Orphans
from kvloop.turn.release_check import frees_on_release
from kvloop.turn.request import Api
from kvloop.turn.restarts import forget_earlier_life
from kvloop.turn.runner import TurnRunner
from kvloop.turn.services import Services, Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from kvloop.config import Settings
    from kvloop.engines.client import EngineClient
    from kvloop.engines.fleet import Engine

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger("kvloop.gateway")

_RELEASE_AT_SHUTDOWN_S = 5.0
_OPENNESS = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}


class Router:
    """The services and the endpoints that show their state."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        client: EngineClient | None = None,
    ) -> None:
        """``clock``: monotonic seconds. ``client``: how engines are called; default: HTTP."""
        self._settings = settings
        client = client or HttpEngineClient(settings.connect_timeout_s)
        metrics = Metrics()
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
            pairs=Pairs(),
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
                silence_s=settings.silence_timeout_s,
                decode_s=settings.decode_timeout_s,
            ),
            clock=clock,
        )
        self._said: set[str] = set()

    def application(self) -> web.Application:
        """The application; its lifetime is that of the connections to the engines."""
        app = web.Application(
            client_max_size=self._settings.max_body_bytes, middlewares=[_errors_in_our_shape]
        )
        runner = TurnRunner(self.services)
        for api in Api:
            app.router.add_post(api.value, turn_handler(api, runner, reuse=self._settings.reuse))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._lifetime)
        return app

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Connections and background work, for as long as turns are served."""
        jobs = [self._watch(), self.services.releases.run()]
        if self._settings.check_releases:
            jobs.append(self._check_releases())
        async with self.services.client, _background(*jobs):
            yield
            await self._give_everything_back()

    async def _lifetime(self, _app: web.Application) -> AsyncGenerator[None]:
        async with self.running():
            yield

    async def _watch(self) -> None:
        await watch(
            self.services.fleet,
            self.services.client,
            interval_s=self._settings.probe_interval_s,
            on_usable=self._usable,
            on_seen=self._seen,
        )

    async def _check_releases(self) -> None:
        """Try each life of each decode node once; again later while it is too busy to tell."""
        fleet = self.services.fleet
        while True:
            for decode in fleet.decodes:
                prefill = next((engine for engine in fleet.prefills if engine.usable), None)
                if prefill is None or not decode.usable or decode.frees_on_release is not None:
                    continue
                verdict = await frees_on_release(prefill, decode, self.services.client)
                decode.frees_on_release = verdict
                if verdict is False:
                    self._say_limits()
            await asyncio.sleep(self._settings.probe_interval_s)

    async def _give_everything_back(self) -> None:
        """Nobody will use the ledger's references any more; D need not pin them to the end."""
        try:
            async with asyncio.timeout(_RELEASE_AT_SHUTDOWN_S):
                await self.services.orphans.settle()
                release_claimed(self.services.ledger.drain(), "router_stops", self.services)
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

    async def _models(self, _request: web.Request) -> web.Response:
        models: dict[str, Any] = {}
        for engine in self.services.fleet.decodes:
            for model in engine.facts.models if engine.usable and engine.facts else ():
                models.setdefault(str(model.get("id")), model)
        return _json({"object": "list", "data": list(models.values())})

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        missing = self.services.fleet.missing()
        warnings = limits(self.services.fleet)
        engines = [
            {
                "url": engine.url,
                "role": engine.role.value,
                "usable": engine.usable,
                "trouble": engine.trouble,
            }
            for engine in self.services.fleet.engines
        ]
        body = {"ready": not missing, "missing": missing, "warnings": warnings, "engines": engines}
        return _json(body, status=503 if missing else 200)

    def _say_limits(self) -> None:
        """Each limit once, when all that is needed to serve has been seen."""
        for limit in limits(self.services.fleet):
            if limit not in self._said:
                self._said.add(limit)
                logger.warning("%s", limit)

    async def _metrics(self, _request: web.Request) -> web.Response:
        metrics, ledger = self.services.metrics, self.services.ledger
        metrics.ledger_entries.set(len(ledger))
        metrics.ledger_bytes.set(ledger.num_bytes)
        for engine in self.services.fleet.engines:
            self._measure(engine)
        return web.Response(
            body=metrics.render(), headers={"content-type": "text/plain; version=0.0.4"}
        )

    def _measure(self, engine: Engine) -> None:
        """Set the gauges of one engine."""
        metrics, now_s = self.services.metrics, self.services.clock()
        names = (engine.role.value, engine.url)
        metrics.engine_usable.labels(*names).set(engine.usable)
        metrics.breaker_open.labels(*names).set(_OPENNESS[engine.breaker.state(now_s)])
        if engine.gate is not None:
            metrics.engine_requests.labels(*names, "running").set(engine.gate.running)
            metrics.engine_requests.labels(*names, "waiting").set(engine.gate.waiting)
        if engine.role is Role.DECODE:
            self.services.pins.expire(now_s)
            for state in PinState:
                tokens = self.services.pins.tokens(engine.url, state)
                metrics.pinned_tokens.labels(engine.url, state.value).set(tokens)


def _gate(role: Role, settings: Settings, clock: Callable[[], float]) -> Gate | None:
    """Rendering is quick and bounded by the turns that are being served."""
    if role is Role.RENDER:
        return None
    is_prefill = role is Role.PREFILL
    limit = settings.prefill_concurrency if is_prefill else settings.decode_concurrency
    return Gate(limit, settings.queue_limit, clock)


def limits(fleet: Fleet) -> list[str]:
    """What these engines keep the loop from doing, in sentences for an operator."""
    found = [
        f"decode node {engine.url} does not stream KV references: streamed turns work but are "
        f"not reused. Install kvloop where its vLLM is installed."
        for engine in fleet.decodes
        if engine.facts is not None and not engine.facts.streams_references
    ]
    found += [
        f"{engine.role.value} node {engine.url} runs vLLM {engine.facts.version}: older than 0.32, "
        f"pins that expire may stay for ever. Upgrade it."
        for engine in fleet.engines
        if engine.facts is not None and not engine.facts.is_supported
    ]
    found += [
        f"prefill node {engine.url} runs without bidirectional_kv_xfer: it computes every prompt. "
        f"Set it in kv_connector_extra_config."
        for engine in fleet.prefills
        if engine.facts is not None and not engine.facts.can_pull
    ]
    found += [
        f"decode node {engine.url} does not free blocks that are released unread: what it pins "
        f"stays until decoder_kv_blocks_ttl. Lower that, and kv_ttl_s with it."
        for engine in fleet.decodes
        if engine.frees_on_release is False
    ]
    renders = any(engine.usable for engine in fleet.renders)
    prefills = [engine for engine in fleet.prefills if engine.facts is not None]
    if prefills and not renders and not any(e.facts and e.facts.renders for e in prefills):
        found.append(
            "no engine renders prompts to token ids: nothing can be proven, so nothing is reused. "
            "Start the prefill nodes with --enable-scale-out, or give --render a render server."
        )
    return found


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )


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


@web.middleware
async def _errors_in_our_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models"
        return error_response(404, f"There is no {request.path} here. There are: {known}.")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return error_response(
            405, f"{request.path} takes {allowed}, not {request.method}.", None, {"allow": allowed}
        )
    except web.HTTPRequestEntityTooLarge:
        return error_response(413, "The request body is too large.")
    except web.HTTPException as error:
        return error_response(error.status, error.reason)
