"""A client of router or engine, and text enough to be worth pulling."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvloop.cluster.engine_spec import SERVED_MODEL_NAME
from tests.contract.target import TTL_S
from tests.streams import streamed_text, streamed_token_ids

_numbers = itertools.count(1)


@dataclass
class Answer:
    """What a client got."""

    text: str
    route: str
    why: str
    pulled: int
    status: int
    raw: bytes


class Client:
    """Asks at temperature 0, streaming."""

    def __init__(self, http: aiohttp.ClientSession, url: str, admin_url: str = "") -> None:
        self.http = http
        self.url, self.admin_url = url, admin_url

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            raw = await response.read()
            said = response.headers.get("x-kvloop-route", "none; pulled=0")
            pulled = re.search(r"pulled=(\d+)", said)
            assert pulled is not None
            kind, why = said.partition(";")[0], said.rpartition("why=")[2]
            return Answer(streamed_text(raw), kind, why, int(pulled[1]), response.status, raw)

    async def chat(
        self, messages: list[dict[str, Any]], *, reuse: str = "on", **fields: Any
    ) -> Answer:
        body = {
            "model": SERVED_MODEL_NAME,
            "messages": messages,
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "cache_salt": reuse,
            **fields,
        }
        answer = await self.post("/v1/chat/completions", body, **{"x-kvloop-reuse": reuse})
        assert answer.status == 200, answer.raw
        assert b"kv_transfer_params" not in answer.raw
        return answer

    async def both(self, messages: list[dict[str, Any]], **fields: Any) -> Answer:
        """With reuse and without; asserts equal answers, token for token; gives the reusing one."""
        on = await self.chat(messages, return_token_ids=True, **fields)
        off = await self.chat(messages, reuse="off", return_token_ids=True, **fields)
        assert off.route == "recompute"
        assert streamed_token_ids(on.raw)
        assert streamed_token_ids(on.raw) == streamed_token_ids(off.raw)
        return on


async def metric(http: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of an engine's samples of one metric."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    return sum(
        float(value) for value in re.findall(rf"^{name}\S* ([0-9.e+-]+)$", text, re.MULTILINE)
    )


async def until_nothing_is_pinned(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until the engine's blocks are free. It frees and reports when it steps: nudge it."""
    async with asyncio.timeout(3 * TTL_S):
        while await metric(http, url, "vllm:kv_cache_usage_perc") > 0:
            nudge = {"model": SERVED_MODEL_NAME, "prompt": "x", "max_tokens": 1}
            async with http.post(f"{url}/v1/completions", json=nudge) as response:
                assert response.status == 200
                await response.read()
            await asyncio.sleep(0.5)


def opening(topic: str = "rivers") -> list[dict[str, Any]]:
    """The first messages of a conversation that no other test has."""
    number = next(_numbers)
    notes = " ".join(
        f"Note {i} on {topic}: basin {i * number} is {i * 37 % 100} km wide." for i in range(1, 13)
    )
    return [
        {"role": "system", "content": f"You answer questions about {topic}. Case {number}."},
        {"role": "user", "content": f"Read these notes. {notes} What do you notice?"},
    ]


def follow(messages: list[dict[str, Any]], answer: str, text: str) -> list[dict[str, Any]]:
    """The next turn's messages."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]
