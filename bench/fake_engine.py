"""An engine that costs nothing: answers at once, streams at a given pace. For router benchmarks.

P and D in one process, on two ports. Prompts are arithmetic sequences of ids, so that every turn
continues the one before, and every reference can be proven.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import msgspec
import uvloop
from aiohttp import web

TOKENS_PER_MESSAGE = 1000
BLOCK_SIZE = 32


def prompt_ids(body: dict[str, object]) -> list[int]:
    messages = body["messages"]
    assert isinstance(messages, list)
    first = int(messages[0]["content"].split()[0])
    return [(first + i) % 50_000 for i in range(TOKENS_PER_MESSAGE * len(messages))]


def params(num_tokens: int, *, prefill: bool) -> dict[str, object]:
    return {
        "do_remote_prefill": prefill,
        "do_remote_decode": not prefill,
        "remote_block_ids": [list(range(-(-num_tokens // BLOCK_SIZE)))],
        "remote_engine_id": "p" if prefill else "d",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "dcp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_prefill_cached_tokens": 0,
    }


def application(pace_s: float, token: str = " token") -> web.Application:
    event = (
        b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,'
        b'"model":"fake","choices":[{"index":0,"delta":{"content":"' + token.encode() + b'"},'
        b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
    )

    async def chat(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        ids = body["kv_transfer_params"].get("prompt_token_ids") or prompt_ids(body)
        if not body.get("stream"):
            usage = {"prompt_tokens": len(ids)}
            given = params(len(ids), prefill=True)
            return web.json_response({"usage": usage, "kv_transfer_params": given})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chunks = body["max_tokens"]
        for _ in range(chunks):
            await response.write(event)
            await asyncio.sleep(pace_s)
        if body["kv_transfer_params"].get("kvloop_stream_reference"):
            start = ids[0] + len(ids)
            out = [(start + i) % 50_000 for i in range(chunks)]
            own = {
                "object": "kvloop.stream_reference",
                "kv_transfer_params": params(len(ids) + chunks - 1, prefill=False),
                "token_ids": out,
            }
            await response.write(b"data: " + json.dumps(own).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def render(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        return web.Response(body=msgspec.json.encode({"token_ids": prompt_ids(body)}))

    async def metrics(_: web.Request) -> web.Response:
        cache = f'block_size="{BLOCK_SIZE}",num_gpu_blocks="99999",enable_prefix_caching="False"'
        info = 'kvloop:engine_info{bidirectional_kv_xfer="true"} 1.0'
        return web.Response(text=f"vllm:cache_config_info{{{cache}}} 1.0\n{info}\n")

    async def fixed(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}], "version": "0.32.0"})

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({}, status=404)

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/chat/completions/render", render)
    app.router.add_post("/v1/completions/render", fixed)
    app.router.add_post("/v1/completions", refuse)
    app.router.add_get("/metrics", metrics)
    for path in ("/health", "/version", "/v1/models"):
        app.router.add_get(path, fixed)
    return app


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", type=int, nargs=2, required=True)
    parser.add_argument("--pace-ms", type=float, default=5.0)
    parser.add_argument("--token-bytes", type=int, default=6)
    options = parser.parse_args()
    token = " token".ljust(options.token_bytes, "x")
    for port in options.ports:
        runner = web.AppRunner(application(options.pace_ms / 1000, token), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
