"""The same two legs with nothing around them: what a router's own cost is compared with.

Like vLLM's sample proxies, on the HTTP library that kvloop uses: render, P leg, D leg, bytes
through. It decides nothing, checks nothing, keeps nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import aiohttp
import uvloop
from aiohttp import web


async def serve(options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def chat(request: web.Request) -> web.StreamResponse:
            data = await request.read()
            # Tokenising is not what is compared: this asks for the ids, too, and drops them.
            async with session.post(f"{options.prefill}{request.path}/render", data=data) as ids:
                await ids.read()
            body = json.loads(data)
            first = {**body, "max_tokens": 1, "stream": False}
            first["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
            async with session.post(options.prefill + request.path, json=first) as prefilled:
                body["kv_transfer_params"] = (await prefilled.json())["kv_transfer_params"]
            async with session.post(options.decode + request.path, json=body) as answer:
                response = web.StreamResponse(headers={"content-type": "text/event-stream"})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", chat)

        async def ready(_: web.Request) -> web.Response:
            return web.Response()

        app.router.add_get("/ready", ready)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", options.port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args()))
