"""Listens for clients and for operators until told to stop, then lets running turns end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from kvloop.gateway.app import Router
from kvloop.gateway.connection import Connection, Limits
from kvloop.gateway.front import front
from kvloop.gateway.traces import log_loop_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvloop.config import Settings

logger = logging.getLogger("kvloop.gateway")

_READY_POLL_S = 0.1
_BACKLOG = 1024
_SHUTDOWN_S = 0.5
"""For requests that are no turns; turns have been waited for by then."""


class ListenError(Exception):
    """An address cannot be listened on; the message says which and what to change."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """URLs of a running router."""

    url: str
    """For clients."""
    admin_url: str | None
    """For operators; None where that listener is switched off."""


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[str]:
    """Serve; yields the URL for clients. Raises ListenError and KeyFileError."""
    async with serving(Router(settings)) as addresses:
        yield addresses.url


@asynccontextmanager
async def serving(router: Router) -> AsyncGenerator[Addresses]:
    """Serve with ``router``; at the end running turns are waited for. Raises ListenError."""
    settings = router.settings
    async with AsyncExitStack() as opened:
        app, limits = router.application(), router.limits
        url = await opened.enter_async_context(
            _listening(app, limits, settings.host, settings.port, "--port")
        )
        admin_url = None
        if settings.admin_host:
            app, limits = router.admin_application(), router.admin_limits()
            admin_url = await opened.enter_async_context(
                _listening(app, limits, settings.admin_host, settings.admin_port, "--admin-port")
            )
        opened.push_async_callback(router.drain)
        yield Addresses(url, admin_url)


@asynccontextmanager
async def _listening(
    app: web.Application, limits: Limits, host: str, port: int, flag: str
) -> AsyncGenerator[str]:
    runner = web.AppRunner(
        app,
        # A client that leaves cancels its turn, and with it what runs on the engines.
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        if runner.server is None:
            raise RuntimeError("the runner has no server after its setup")
        known = ", ".join(
            f"{route.method} {route.resource.canonical}"
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        )
        server = runner.server
        server.request_handler = front(server.request_handler, limits.counters, known)
        try:
            await _Site(runner, limits, host, port).start()
        except OSError as error:
            raise ListenError(
                f"cannot listen on {host}:{port}: {error.strerror}. Choose another {flag}."
            ) from error
        bound_host, bound_port = runner.addresses[0][:2]
        yield f"http://{_in_url(bound_host)}:{bound_port}"
    finally:
        await runner.cleanup()


class _Site(web.BaseSite):
    """A TCP address whose connections are ours."""

    def __init__(self, runner: web.AppRunner, limits: Limits, host: str, port: int) -> None:
        super().__init__(runner, backlog=_BACKLOG)
        self._limits = limits
        self._host = host
        self._port = port

    @property
    def name(self) -> str:
        return f"http://{_in_url(self._host)}:{self._port}"

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner was not set up")
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(server, self._limits),
            self._host,
            self._port,
            backlog=self._backlog,
            reuse_address=True,
        )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def serve_until_signalled(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends the process at once.

    SIGHUP reads the API keys again. Raises ListenError and KeyFileError.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_loop_error)
    router = Router(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if settings.api_keys:
        loop.add_signal_handler(signal.SIGHUP, router.reload_keys)
    async with serving(router) as addresses:
        logger.info("kvloop listens on %s", addresses.url)
        if addresses.admin_url is not None:
            logger.info("metrics and engines are on %s", addresses.admin_url)
        await stop.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        logger.info("stopping: running turns have %.0f s to end", settings.drain_timeout_s)


async def wait_until_ready(url: str, timeout_s: float) -> None:
    """Until the router at ``url`` can serve. Raises TimeoutError with what is missing."""
    deadline_s = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
                state = await response.text()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the router at {url} is not ready: {state}")
            await asyncio.sleep(_READY_POLL_S)
