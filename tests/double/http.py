"""The double's HTTP surface: vLLM's paths over one engine, on a loopback port.

``async with running(engine) as url`` serves it; :func:`kill` and :func:`revive` are what happens to
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from tests.double import answers, turns
from tests.double.answers import CHAT, COMPLETION
from tests.double.engine import Engine, Received, RefusedError
from tests.double.metrics import metrics_text
from tests.double.prompts import chat_prompt, completion_prompts, media_of

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Surface:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transports: set[asyncio.BaseTransport] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._at_the_door], client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _at_the_door(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        assert request.transport is not None
        self.transports = {one for one in self.transports if not one.is_closing()}
        self.transports.add(request.transport)
        if self.engine.dead:  # its server has shut down
            request.transport.close()
            return web.Response(status=500)
        try:
            return await handler(request)
        except RefusedError as refused:
            body = answers.error_body(refused.status, str(refused), refused.param)
            return _json(body, refused.status)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, COMPLETION)

    async def _turn(self, request: web.Request, kind: str) -> web.StreamResponse:
        received = await self._receive(request)
        self.engine.requests.append(received)
        return await turns.answer(self.engine, request, json.loads(await request.text()), kind)

    async def _receive(self, request: web.Request) -> Received:
        try:
            body = json.loads(await request.text() or "null")
        except ValueError as error:
            raise RefusedError(400, f"JSON decode error: {error}") from error
        if not isinstance(body, dict):
            raise RefusedError(400, "Input should be a valid dictionary")
        names = {name.lower(): value for name, value in request.headers.items()}
        received = Received(request.path, body, names)
        self.engine.calls.append(received)
        return received

    async def _render_chat(self, request: web.Request) -> web.Response:
        body = await self._for_render(request)
        hashes = media_of(body)
        features = {"mm_hashes": {"image": hashes}} if hashes else None
        ids = chat_prompt(self.engine, body)
        ids = ids[:-3] if self.engine.renders_differently else ids
        return _json(self._rendered(body, ids, features))

    async def _render_completion(self, request: web.Request) -> web.Response:
        body = await self._for_render(request)
        return _json([self._rendered(body, ids, None) for ids in completion_prompts(body)])

    async def _for_render(self, request: web.Request) -> dict[str, Any]:
        body = (await self._receive(request)).body
        if not self.engine.renders:
            raise RefusedError(403, "Scale-out endpoints are disabled. Restart vllm serve with ...")
        turns.check_model(self.engine, body)
        return body

    def _rendered(
        self, body: dict[str, Any], ids: list[int], features: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "request_id": "double",
            "token_ids": ids,
            "features": features,
            "sampling_params": {"max_tokens": turns.max_tokens(self.engine, body)},
            "model": body.get("model"),
            "stream": bool(body.get("stream")),
            "cache_salt": body.get("cache_salt"),
        }

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = (await self._receive(request)).body
        turns.check_model(self.engine, body)
        ids = chat_prompt(self.engine, body) if "messages" in body else completion_prompts(body)[0]
        limit = self.engine.max_model_len
        said = {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None}
        return _json(said)

    async def _models(self, _: web.Request) -> web.Response:
        engine = self.engine
        base = {"id": engine.model, "object": "model", "created": 0, "owned_by": "vllm"}
        served = [{**base, "root": engine.model, "max_model_len": engine.max_model_len}]
        served += [
            {**base, "id": name, "root": name, "parent": engine.model}
            for name in sorted(engine.adapters)
        ]
        return _json({"object": "list", "data": served})

    async def _version(self, _: web.Request) -> web.Response:
        native = self.engine.native_stream_reference
        return _json({"version": "0.33.0" if native else "0.32.0"})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=metrics_text(self.engine))


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(text=answers.compact(value), status=status, content_type="application/json")


class _Address:
    """Where an engine listens, while it does."""

    def __init__(self, runner: web.AppRunner, surface: Surface, port: int) -> None:
        self._runner, self._surface, self.port = runner, surface, port
        self._site: web.TCPSite | None = None

    async def open(self) -> None:
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self._site, self.port = site, self._runner.addresses[-1][1]

    async def close(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None
        for transport in self._surface.transports:
            with contextlib.suppress(RuntimeError):
                transport.close()
        self._surface.transports.clear()


_addresses: WeakKeyDictionary[Engine, _Address] = WeakKeyDictionary()


@asynccontextmanager
async def serving(engine: Engine, port: int = 0) -> AsyncIterator[str]:
    """The engine on loopback; yields its URL."""
    surface = Surface(engine)
    runner = web.AppRunner(
        surface.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0
    )
    await runner.setup()
    address = _addresses[engine] = _Address(runner, surface, port)
    await address.open()
    try:
        yield f"http://127.0.0.1:{address.port}"
    finally:
        await runner.cleanup()


running = serving


async def kill(engine: Engine) -> None:
    """Its process is gone: connections break, new ones are refused, its memory is unreadable."""
    engine.dead = True
    await _addresses[engine].close()


async def revive(engine: Engine) -> None:
    """Another process at the same address; see :meth:`Engine.restart`."""
    engine.restart()
    await _addresses[engine].open()


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
