"""A router in front of doubles, and a client that checks every answer against the truth."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvloop.config import Settings
from kvloop.gateway.app import Router
from kvloop.gateway.server import serving as serving_router
from kvloop.gateway.server import wait_until_ready
from tests.double.engine import Engine, Fabric, reference_answer
from tests.double.http import serving
from tests.double.tokens import decode, encode, render_chat
from tests.streams import streamed_text


@dataclass
class Answer:
    """What a client got."""

    status: int
    text: str
    headers: dict[str, str]
    body: bytes

    @property
    def route(self) -> str:
        return self.headers.get("x-kvloop-route", "none").partition(";")[0]

    @property
    def pulled(self) -> int:
        return int(self.headers["x-kvloop-route"].split("pulled=")[1].split(";")[0])


@dataclass
class Stack:
    """Everything a test touches."""

    fabric: Fabric
    prefills: list[Engine]
    decodes: list[Engine]
    router: Router
    url: str
    http: aiohttp.ClientSession
    admin_url: str

    @property
    def prefill(self) -> Engine:
        return self.prefills[0]

    @property
    def decode(self) -> Engine:
        return self.decodes[0]

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            text = _text(raw, response.headers.get("content-type", ""))
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, text, names, raw)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        headers: dict[str, str] | None = None,
        right: bool = True,
        **fields: Any,
    ) -> Answer:
        """One streamed turn; asserts that the answer is the one of an engine that computed all."""
        body = {"model": "double", "messages": messages, "max_tokens": 24, "stream": True, **fields}
        answer = await self.post("/v1/chat/completions", body, headers)
        if right:
            ids = render_chat(messages, strips_reasoning=self.prefill.strips_reasoning)
            wanted = reference_answer(ids, body["max_tokens"], body.get("cache_salt", ""))
            assert answer.status == 200, answer.body
            assert answer.text == decode(wanted)
        assert b"kv_transfer_params" not in answer.body
        assert b"kvloop.stream_reference" not in answer.body
        return answer

    async def completion(self, prompt: Any, **fields: Any) -> Answer:
        """One streamed completion, checked like :meth:`chat`."""
        body = {"model": "double", "prompt": prompt, "max_tokens": 24, "stream": True, **fields}
        answer = await self.post("/v1/completions", body)
        ids = prompt if isinstance(prompt, list) else encode(prompt)
        assert answer.status == 200, answer.body
        assert answer.text == decode(reference_answer(ids, body["max_tokens"]))
        return answer


def _text(raw: bytes, content_type: str) -> str:
    if not content_type.startswith("text/event-stream"):
        choices = json.loads(raw).get("choices") if raw.startswith(b"{") else None
        if not choices:
            return ""
        return choices[0].get("text") or choices[0].get("message", {}).get("content", "")
    return streamed_text(raw)


_QUICK: dict[str, Any] = {
    "port": 0,
    "admin_port": 0,
    "probe_interval_s": 0.05,
    "check_releases": False,
    "drain_timeout_s": 0.5,
}


@asynccontextmanager
async def stack(
    *, prefills: int = 1, decodes: int = 1, settings: dict[str, Any] | None = None, **engine: Any
) -> AsyncIterator[Stack]:
    """Doubles with these settings, and a router that has seen them; P has no prefix cache."""
    fabric = Fabric()
    ps = [Engine(fabric, **{"prefix_caching": False, **engine}) for _ in range(prefills)]
    ds = [Engine(fabric, **engine) for _ in range(decodes)]
    async with AsyncExitStack() as open_:
        p_urls = [await open_.enter_async_context(serving(one)) for one in ps]
        d_urls = [await open_.enter_async_context(serving(one)) for one in ds]
        router = Router(
            Settings(
                prefill=tuple(p_urls),
                decode=tuple(d_urls),
                **{**_QUICK, **(settings or {})},
            ),
            clock=fabric.clock,
        )
        addresses = await open_.enter_async_context(serving_router(router))
        http = await open_.enter_async_context(aiohttp.ClientSession())
        await wait_until_ready(addresses.url, timeout_s=10)
        yield Stack(fabric, ps, ds, router, addresses.url, http, addresses.admin_url or "")


def opening(text: str = "Tell me about rivers.", system: str = "You help.") -> list[dict[str, Any]]:
    """The first messages of a conversation, long enough to be worth pulling."""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": text + " The context is this and that." * 6},
    ]


def follow(messages: list[dict[str, Any]], answer: str, text: str = "Go on.") -> list[Any]:
    """The next turn's messages."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]
