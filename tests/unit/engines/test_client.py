"""The HTTP client: what a reader does not take waits on the engine, not here."""

from __future__ import annotations

import asyncio
import socket

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


async def test_an_engine_that_takes_a_second_try_to_connect_is_reached() -> None:
    """Its queue of connections is full at first: what is sent to open one more is lost."""
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    server.settimeout(10)
    filler = socket.create_connection(server.getsockname())
    url = f"http://127.0.0.1:{server.getsockname()[1]}"

    def answer_the_second() -> None:
        server.accept()[0].close()
        with server.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK")

    async with HttpEngineClient(1.0) as client:  # the kernel asks again after one second only
        asked = asyncio.create_task(client.get(url, "/", timeout_s=10.0))
        await asyncio.sleep(0.25)
        answered = asyncio.create_task(asyncio.to_thread(answer_the_second))
        reply = await asked
        await answered
    assert reply.body == b"OK"
    filler.close()
    server.close()
