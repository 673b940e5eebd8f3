"""How the router and its engines are: to clients little of it, to operators all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from kvloop.engines.breaker import BreakerState
from kvloop.engines.fleet import Role
from kvloop.ledger.pins import PinState

if TYPE_CHECKING:
    from kvloop.engines.fleet import Engine, Fleet
    from kvloop.gateway.admission import Admission
    from kvloop.gateway.connection import Limits
    from kvloop.gateway.identity import Callers
    from kvloop.turn.services import Services

_OPENNESS = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}


class Status:
    """Handlers over the router's state; they change nothing."""

    def __init__(
        self, services: Services, callers: Callers, admission: Admission, limits: Limits
    ) -> None:
        """``limits``: of the listener that clients use."""
        self._services = services
        self._callers = callers
        self._admission = admission
        self._limits = limits

    async def models(self, request: web.Request) -> web.Response:
        """The decode nodes' models. Raises RefusedError for a caller who is not known."""
        self._callers.identify(request.headers)
        models: dict[str, Any] = {}
        for engine in self._services.fleet.decodes:
            for model in engine.facts.models if engine.usable and engine.facts else ():
                models.setdefault(str(model.get("id")), model)
        return json_response({"object": "list", "data": list(models.values())})

    async def health(self, _: web.Request) -> web.Response:
        """The process is up."""
        return json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Whether turns can be served; names no engine."""
        missing = [
            f"no usable {role.value} node"
            for role in (Role.PREFILL, Role.DECODE)
            if not any(e.usable for e in self._services.fleet.engines if e.role is role)
        ]
        return self._readiness(missing)

    async def ready_in_full(self, _: web.Request) -> web.Response:
        """Whether turns can be served, which engines cannot be used and why, what is not reused."""
        fleet = self._services.fleet
        return self._readiness(
            fleet.missing(),
            warnings=limits(fleet),
            engines=[self._engine(engine) for engine in fleet.engines],
        )

    async def engines(self, _: web.Request) -> web.Response:
        """Every engine as it is now."""
        fleet = self._services.fleet
        off = [
            {"prefill": prefill, "decode": decode, "why": why}
            for prefill, decode, why in self._services.pairs.switched_off()
        ]
        engines = [self._engine(engine) for engine in fleet.engines]
        return json_response({"engines": engines, "reuse_off": off})

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        metrics, ledger = self._services.metrics, self._services.ledger
        metrics.ledger_entries.set(len(ledger))
        metrics.ledger_bytes.set(ledger.num_bytes)
        self._limits.counters.connections.set(len(self._limits.open))
        metrics.reuse_off.clear()
        for prefill, decode, _why in self._services.pairs.switched_off():
            metrics.reuse_off.labels(prefill, decode).set(1)
        for engine in self._services.fleet.engines:
            self._measure(engine)
        return web.Response(
            body=metrics.render(), headers={"content-type": "text/plain; version=0.0.4"}
        )

    def _readiness(self, missing: list[str], **more: Any) -> web.Response:
        missing = ["draining", *missing] if self._admission.draining else missing
        body = {"ready": not missing, "missing": missing, **more}
        return json_response(body, status=503 if missing else 200)

    def _engine(self, engine: Engine) -> dict[str, Any]:
        gate = engine.gate
        return {
            "url": engine.url,
            "role": engine.role.value,
            "usable": engine.usable,
            "trouble": engine.trouble,
            "breaker": engine.breaker.state(self._services.clock()).name.lower(),
            "running": gate.running if gate is not None else None,
            "waiting": gate.waiting if gate is not None else None,
            "version": engine.facts.version if engine.facts is not None else None,
        }

    def _measure(self, engine: Engine) -> None:
        """Set the gauges of one engine."""
        metrics, now_s = self._services.metrics, self._services.clock()
        names = (engine.role.value, engine.url)
        metrics.engine_usable.labels(*names).set(engine.usable)
        metrics.breaker_open.labels(*names).set(_OPENNESS[engine.breaker.state(now_s)])
        if engine.gate is not None:
            metrics.engine_requests.labels(*names, "running").set(engine.gate.running)
            metrics.engine_requests.labels(*names, "waiting").set(engine.gate.waiting)
        if engine.role is Role.DECODE:
            self._services.pins.expire(now_s)
            for state in PinState:
                tokens = self._services.pins.tokens(engine.url, state)
                metrics.pinned_tokens.labels(engine.url, state.value).set(tokens)


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


def json_response(body: Any, status: int = 200) -> web.Response:
    """``body`` as JSON."""
    return raw_json_response(msgspec.json.encode(body), status)


def raw_json_response(body: bytes, status: int = 200) -> web.Response:
    """JSON that is encoded already."""
    return web.Response(status=status, body=body, content_type="application/json")
