"""The double's HTTP surface: vLLM's paths, bodies, metrics and event framing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.engine_double.engine import Engine, RefusedError, Served
from tests.engine_double.tokens import decode, encode, render_chat


def error(status: int, message: str) -> web.Response:
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


class Surface:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions/render", self.render_chat)
        app.router.add_post("/v1/completions/render", self.render_completion)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def models(self, _: web.Request) -> web.Response:
        data = [{"id": self.engine.model, "object": "model", "max_model_len": 100_000}]
        return web.json_response({"object": "list", "data": data})

    async def version(self, _: web.Request) -> web.Response:
        native = self.engine.native_stream_reference
        return web.json_response({"version": "0.33.0" if native else "0.32.0"})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.dead else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        engine = self.engine
        lines = [
            f'vllm:cache_config_info{{block_size="{engine.block_size}",'
            f'num_gpu_blocks="{engine.num_blocks}",'
            f'enable_prefix_caching="{engine.prefix_caching}"}} 1.0',
            f"process_start_time_seconds {engine.started_s}",
        ]
        if engine.plugin:
            bidirectional = str(engine.bidirectional).lower()
            lines.append(f'kvloop:engine_info{{bidirectional_kv_xfer="{bidirectional}"}} 1.0')
        return web.Response(text="\n".join(lines) + "\n")

    async def render_chat(self, request: web.Request) -> web.Response:
        if not self.engine.renders:
            return error(403, "scale-out is not enabled")
        ids = self._chat_ids(await request.json())
        ids = ids[:-3] if self.engine.renders_differently else ids
        return web.json_response({"token_ids": ids, "features": None})

    async def render_completion(self, request: web.Request) -> web.Response:
        if not self.engine.renders:
            return error(403, "scale-out is not enabled")
        body = await request.json()
        if "prompt" not in body:
            return error(400, "Either prompt or prompt_embeds must be provided")
        return web.json_response([{"token_ids": _completion_ids(body["prompt"])}])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, "chat.completion")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, "text_completion")

    async def _turn(self, request: web.Request, kind: str) -> web.StreamResponse:
        engine = self.engine
        body = await request.json()
        names = {name.lower(): value for name, value in request.headers.items()}
        engine.requests.append((request.path, json.loads(await request.text()), names))
        if engine.hold is not None:
            await engine.hold.wait()
        if engine.break_next:
            engine.break_next -= 1
            assert request.transport is not None
            request.transport.close()
        if engine.dead:
            return error(500, "EngineCore encountered an issue")
        params = body.get("kv_transfer_params")
        if isinstance(params, str):
            engine.dead = True
        if body.get("model") != engine.model:
            if params and params.get("do_remote_prefill"):
                producer = engine.fabric.engines.get(params["remote_engine_id"])
                if producer is not None:
                    producer.notified(params["remote_request_id"])
            return error(404, f"The model `{body.get('model')}` does not exist.")
        if engine.refuse_next:
            return error(engine.refuse_next.pop(0), "refused by the test")
        ids = (params or {}).pop("prompt_token_ids", None)
        ids = None if engine.ignores_ids else ids
        if ids is None:
            chat = kind == "chat.completion"
            ids = self._chat_ids(body) if chat else _completion_ids(body["prompt"])
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 64
        asked = bool((params or {}).pop("kvloop_stream_reference", False))
        try:
            served = engine.serve(ids, max_tokens, params, body.get("cache_salt") or "")
        except RefusedError as refused:
            return error(refused.status, str(refused))
        self._apply_stop(body, served)
        if body.get("stream"):
            return await self._stream(request, body, served, kind, asked=asked)
        return web.json_response(_whole(body, served, kind))

    def _apply_stop(self, body: dict[str, Any], served: Served) -> None:
        """A stop string ends a request on the API side, as an abort."""
        stops = body.get("stop") or []
        text = decode(served.output)
        for stop in [stops] if isinstance(stops, str) else stops:
            if stop in text:
                served.output = encode(text[: text.index(stop)])
                served.finish_reason = "stop"
                self.engine.abort(served)

    async def _wait_until_nobody_reads(self, served: Served) -> None:
        """A slow answer: only its reader's leaving ends it."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.engine.disconnects += 1
            self.engine.abort(served)
            raise

    def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        return render_chat(body["messages"], strips_reasoning=self.engine.strips_reasoning)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], served: Served, kind: str, *, asked: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = list(_events(body, served, kind, native=self.engine.native_stream_reference))
        if asked and self.engine.plugin:
            own = {
                "object": "kvloop.stream_reference",
                "kv_transfer_params": served.params,
                "token_ids": served.output,
            }
            events.insert(-1, f"data: {json.dumps(own, separators=(',', ':'))}\n\n")
        for number, event in enumerate(events):
            if number == self.engine.pause_stream_after:
                await self._wait_until_nobody_reads(served)
            if number == self.engine.break_stream_after and request.transport is not None:
                self.engine.abort(served)
                request.transport.close()
                return response
            for piece in self.engine.cut_stream(event.encode()):
                await response.write(piece)
        await response.write_eof()
        return response


def _completion_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    return encode(prompt[0] if isinstance(prompt, list) else prompt)


def _usage(served: Served) -> dict[str, Any]:
    return {
        "prompt_tokens": len(served.prompt),
        "completion_tokens": len(served.output),
        "total_tokens": len(served.prompt) + len(served.output),
    }


def _whole(body: dict[str, Any], served: Served, kind: str) -> dict[str, Any]:
    text = decode(served.output)
    choice: dict[str, Any] = {"index": 0, "finish_reason": served.finish_reason, "logprobs": None}
    if kind == "chat.completion":
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    wanted = bool(body.get("return_token_ids"))
    choice["token_ids"] = served.output if wanted else None
    return {
        "id": "double",
        "object": kind,
        "model": body.get("model"),
        "choices": [choice],
        "usage": _usage(served),
        "prompt_token_ids": served.prompt if wanted else None,
        "kv_transfer_params": served.params,
    }


def _events(body: dict[str, Any], served: Served, kind: str, *, native: bool) -> Any:
    def event(choices: list[dict[str, Any]], **fields: Any) -> str:
        message = {"id": "double", "object": f"{kind}.chunk", "choices": choices, **fields}
        return f"data: {json.dumps(message)}\n\n"

    def choice(text: str, finish: str | None) -> list[dict[str, Any]]:
        said = {"delta": {"content": text}} if kind == "chat.completion" else {"text": text}
        return [{"index": 0, **said, "finish_reason": finish}]

    if kind == "chat.completion":
        yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for number, token in enumerate(served.output):
        last = number == len(served.output) - 1
        fields = {"kv_transfer_params": served.params} if last and native else {}
        yield event(choice(decode([token]), served.finish_reason if last else None), **fields)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event([], usage=_usage(served))
    yield "data: [DONE]\n\n"


@asynccontextmanager
async def serving(engine: Engine, port: int = 0) -> AsyncIterator[str]:
    """The engine on loopback; yields its URL."""
    runner = web.AppRunner(
        Surface(engine).application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0,
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
