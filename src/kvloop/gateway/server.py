"""Runs the application on a port until it is told to stop, then lets running turns end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from kvloop.gateway.app import Router

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvloop.config import Settings

logger = logging.getLogger("kvloop.gateway")

_READY_POLL_S = 0.1


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[str]:
    """Serve; yields the router's URL. Raises OSError when the port cannot be had."""
    runner = web.AppRunner(
        Router(settings).application(),
        # A client that leaves cancels its turn, and with it what runs on the engines.
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=settings.drain_timeout_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def serve_until_signalled(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as url:
        logger.info("kvloop listens on %s", url)
        await stop.wait()
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
