"""Two engines behind HTTP, real or doubles: what the script may ask of them and see of them.

Nothing but the subclass's clock tells one kind from the other.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import aiohttp

BLOCK_SIZE = 32
LEASE_S = 20
TTL_S = 36
ENGINES = ("P", "D")
"""A prefill node without prefix cache, and a decode node, which has one."""

_STABLE_LOOKS = 1
_SETTLE_TIMEOUT_S = 30.0
_COUNTERS = {
    "late_notices": "nixl_num_notifications_after_expiry_total",
    "expired": "nixl_num_kv_expired_reqs_total",
    "failed_transfers": "nixl_num_failed_transfers_total",
    "reads": "nixl_bytes_transferred_count",
    "bytes_read": "nixl_bytes_transferred_sum",
}


@dataclass(frozen=True, slots=True)
class Gauges:
    """What one engine's ``/metrics`` says: blocks in use now, and counts since its start."""

    held_blocks: int
    late_notices: int
    expired: int
    failed_transfers: int
    reads: int
    bytes_read: int

    def since(self, before: Gauges, block_bytes: int) -> dict[str, int]:
        """What changed, and what is held; without what is nothing."""
        seen = {"held_blocks": self.held_blocks}
        for name in ("late_notices", "expired", "failed_transfers", "reads"):
            seen[name] = getattr(self, name) - getattr(before, name)
        seen["blocks_read"] = (self.bytes_read - before.bytes_read) // block_bytes
        return {name: number for name, number in seen.items() if number}


class Target:
    """The engines' addresses, a client, and how time passes there."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        urls: Mapping[str, str],
        model: str,
        block_bytes: int,
        pass_time: Callable[[float], Any],
        *,
        settle_s: float,
    ) -> None:
        """``urls``: of ENGINES. ``pass_time``: awaited to let that many of D's seconds go by.

        ``settle_s``: between two looks that must agree.
        """
        self.http, self.urls, self.model = http, urls, model
        self.block_bytes, self.pass_time, self.settle_s = block_bytes, pass_time, settle_s

    async def post(self, engine: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and parsed body of an answer that is not streamed."""
        async with self.http.post(self.urls[engine] + path, json=body) as response:
            return response.status, json.loads(await response.read() or b"null")

    async def stream(
        self, engine: str, path: str, body: dict[str, Any], *, events: int | None = None
    ) -> tuple[int, list[str]]:
        """Status and the data of its events; after ``events`` of them the client leaves."""
        read: list[str] = []
        asked = {**body, "stream": True}
        async with self.http.post(self.urls[engine] + path, json=asked) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    read.append(line[6:].decode().strip())
                if len(read) == events:
                    response.close()
                    break
            return response.status, read

    async def settled(self) -> dict[str, Gauges]:
        """What all engines say once nothing moves any more. Raises TimeoutError."""
        agreed, before = 0, None
        async with asyncio.timeout(_SETTLE_TIMEOUT_S):
            while True:
                looks = await asyncio.gather(*map(self._look, ENGINES))
                now = dict(zip(ENGINES, looks, strict=True))
                agreed = agreed + 1 if now == before else 0
                if agreed == _STABLE_LOOKS:
                    return now
                before = now
                await asyncio.sleep(self.settle_s)

    async def _look(self, engine: str) -> Gauges:
        """An idle engine frees and counts nothing until it steps: nudge it."""
        nudge = {"model": self.model, "prompt": [1], "max_tokens": 1}
        status, _ = await self.post(engine, "/v1/completions", nudge)
        assert status == 200
        async with self.http.get(self.urls[engine] + "/metrics") as response:
            return gauges(await response.text())


def gauges(metrics: str) -> Gauges:
    """Parse ``/metrics``."""

    def total(name: str) -> float:
        samples = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
        return sum(map(float, samples))

    num_blocks = re.search(r'num_gpu_blocks="(\d+)"', metrics)
    assert num_blocks is not None
    usable = int(num_blocks[1]) - 1  # vLLM keeps one block for itself and counts without it
    counted = {name: int(total(metric)) for name, metric in _COUNTERS.items()}
    assert set(counted) == {field.name for field in fields(Gauges)} - {"held_blocks"}
    return Gauges(held_blocks=round(total("kv_cache_usage_perc") * usable), **counted)
