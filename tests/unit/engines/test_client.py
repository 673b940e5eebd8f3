"""The HTTP client: what a reader does not take waits on the engine, not here."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvloop.engines.client import HttpEngineClient


async def test_an_answer_that_is_not_read_is_not_collected() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(10_000))

    app = web.Application()
    app.router.add_post("/", endless)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with (
        HttpEngineClient(5.0) as client,
        client.stream(url, "/", b"", {}, silence_timeout_s=5.0) as reply,
    ):
        chunks = reply.chunks()
        sizes = []
        for _ in range(30):
            sizes.append(len(await anext(chunks)))
            for _ in range(100):  # the engine has all the time to send more
                await asyncio.sleep(0)
        assert max(sizes) < 100_000
    await runner.cleanup()
