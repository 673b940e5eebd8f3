"""The double on a loopback port.

``async with running(engine) as url`` serves it; :func:`kill` and :func:`revive` are what happens to
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from tests.double.engine import Engine
from tests.double.exchange import Whole
from tests.double.surface import GETS, POSTS, Surface

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _HttpExchange:
    """See :class:`tests.double.exchange.Exchange`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def begin(self) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        self.response = web.StreamResponse(headers=headers)
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Each piece is one HTTP chunk."""
        assert self.response is not None
        await self.response.write(data)

    async def end(self) -> None:
        assert self.response is not None
        await self.response.write_eof()

    def break_off(self) -> None:
        if self._request.transport is not None:
            self._request.transport.close()


class _Server:
    """An engine's surface as an aiohttp application."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.surface = Surface(engine)
        self.transports: set[asyncio.BaseTransport] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._at_the_door], client_max_size=64 * 2**20)
        for path in POSTS:
            app.router.add_post(path, self._post)
        for path in GETS:
            app.router.add_get(path, self._get)
        return app

    @web.middleware
    async def _at_the_door(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        assert request.transport is not None
        self.transports = {one for one in self.transports if not one.is_closing()}
        self.transports.add(request.transport)
        if self.engine.dead:  # its server has shut down
            request.transport.close()
            return web.Response(status=500)
        return await handler(request)

    async def _get(self, request: web.Request) -> web.Response:
        return _response(self.surface.get(request.path))

    async def _post(self, request: web.Request) -> web.StreamResponse:
        exchange = _HttpExchange(request)
        names = {name.lower(): value for name, value in request.headers.items()}
        data = await request.read()
        whole = await self.surface.post(request.path, data, names, exchange)
        if whole is not None:
            return _response(whole)
        return exchange.response or web.Response(status=500)


def _response(whole: Whole) -> web.Response:
    return web.Response(text=whole.text, status=whole.status, content_type=whole.content_type)


class _Address:
    """Where an engine listens, while it does."""

    def __init__(self, runner: web.AppRunner, server: _Server, port: int) -> None:
        self._runner, self._server, self.port = runner, server, port
        self._site: web.TCPSite | None = None

    async def open(self) -> None:
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self._site, self.port = site, self._runner.addresses[-1][1]

    async def close(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None
        for transport in self._server.transports:
            with contextlib.suppress(RuntimeError):
                transport.close()
        self._server.transports.clear()


_addresses: WeakKeyDictionary[Engine, _Address] = WeakKeyDictionary()


@asynccontextmanager
async def serving(engine: Engine, port: int = 0) -> AsyncIterator[str]:
    """The engine on loopback; yields its URL."""
    server = _Server(engine)
    runner = web.AppRunner(
        server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0
    )
    await runner.setup()
    address = _addresses[engine] = _Address(runner, server, port)
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
