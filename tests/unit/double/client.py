"""A P and a D over HTTP, and a client that reads what they say exactly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.double.engine import Engine, Fabric
from tests.double.http import running

COLD = {"do_remote_decode": True, "do_remote_prefill": False}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IDS = list(range(100, 260))
MESSAGES = [{"role": "user", "content": "Tell me about rivers. " * 6}]


@dataclass
class Doubles:
    """Both engines, their addresses, one client."""

    p: Engine
    d: Engine
    p_url: str
    d_url: str
    fabric: Fabric
    http: aiohttp.ClientSession

    async def post(self, url: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.http.post(url, json={"model": "double", **body}) as response:
            return response.status, json.loads(await response.text())

    async def chunks(self, url: str, body: dict[str, Any]) -> list[bytes]:
        """HTTP chunks of a stream, one by one."""
        asked = {"model": "double", "stream": True, **body}
        async with self.http.post(url, json=asked) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            chunks, unfinished = [], b""
            async for data, is_end in response.content.iter_chunks():
                unfinished += data
                if is_end:
                    chunks.append(unfinished)
                    unfinished = b""
            return chunks

    async def events(self, url: str, body: dict[str, Any]) -> list[Any]:
        """Events of a stream; the last one is [DONE]."""
        text = b"".join(await self.chunks(url, body)).decode()
        *events, end = text.split("\n\n")
        assert (events[-1], end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    async def prefill(self, body: dict[str, Any], reference: Any = None) -> Any:
        """P's answer to a leg; asserts that it is one."""
        path = CHAT if "messages" in body else COMPLETIONS
        params = {**(reference or {}), **COLD}
        status, answer = await self.post(
            self.p_url + path, {**body, "max_tokens": 1, "kv_transfer_params": params}
        )
        assert status == 200, answer
        return answer


@asynccontextmanager
async def doubles(**settings: Any) -> AsyncIterator[Doubles]:
    fabric = Fabric()
    p, d = Engine(fabric, **settings), Engine(fabric, **settings)
    async with AsyncExitStack() as open_:
        p_url = await open_.enter_async_context(running(p))
        d_url = await open_.enter_async_context(running(d))
        http = await open_.enter_async_context(aiohttp.ClientSession())
        yield Doubles(p, d, p_url, d_url, fabric, http)
