"""The engine: prompts in, answers out, references as vLLM 0.32 gives and takes them.

Knobs are plain attributes; engines find each other through a :class:`Fabric`.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.engine_double.kv import START, KVMemory, Pin, chain, next_kv
from tests.engine_double.tokens import IM_END

PULL_THRESHOLD = 64
EXPIRY_MARGIN_S = 5.0


class RefusedError(Exception):
    """The engine answers with an error."""

    def __init__(self, status: int, message: str = "Internal server error") -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Fabric:
    """NIXL between the engines, and a clock that stands still until it is moved."""

    now_s: float = 0.0
    engines: dict[str, Engine] = field(default_factory=dict)
    read_tokens: int = 0

    def clock(self) -> float:
        return self.now_s


@dataclass
class Served:
    """What became of one request."""

    prompt: list[int]
    output: list[int]
    finish_reason: str
    params: dict[str, Any] | None
    cached_tokens: int


class Engine:
    """One engine, P or D as it is used."""

    def __init__(
        self,
        fabric: Fabric,
        *,
        block_size: int = 16,
        num_blocks: int = 2000,
        prefix_caching: bool = True,
        plugin: bool = True,
        ttl_s: float = 480.0,
    ) -> None:
        self.fabric = fabric
        self.block_size, self.num_blocks = block_size, num_blocks
        self.prefix_caching, self.plugin, self.ttl_s = prefix_caching, plugin, ttl_s
        self.model = "double"
        self.clock_ahead_s = 12_345.0
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        # knobs
        self.refuse_next: list[int] = []
        self.renders = True
        self.strips_reasoning = False
        self.bidirectional = True
        self.native_stream_reference = False
        self.extra_exported_blocks = 0
        self.hold: asyncio.Event | None = None
        self.break_stream_after: int | None = None
        self.break_next = 0
        self.ignores_ids = False
        self.renders_differently = False
        self.pause_stream_after: int | None = None
        self.disconnects = 0
        self.cut_stream: Callable[[bytes], list[bytes]] = lambda data: [data]
        self.started_s = 1.0
        self._numbers = itertools.count(1)
        self._begin_life()

    def _begin_life(self) -> None:
        self.engine_id = uuid.uuid4().hex
        self.dead = False
        self.late_notices = 0
        self.memory = KVMemory(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching)
        self.fabric.engines[self.engine_id] = self

    def restart(self) -> None:
        """Another process at the same address: nothing is kept."""
        del self.fabric.engines[self.engine_id]
        self.started_s += 1.0
        self._begin_life()

    @property
    def pinned_blocks(self) -> int:
        self.memory.expire(self._now())
        return sum(len(pin.blocks) for pin in self.memory.pins.values())

    def _now(self) -> float:
        return self.fabric.now_s + self.clock_ahead_s

    def serve(
        self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None, salt: str = ""
    ) -> Served:
        """Compute one request. Raises RefusedError; may die."""
        self.memory.expire(self._now())
        params = dict(params) if params else {}
        seed = START + salt.encode()
        table = self.memory.hit(seed, prompt)
        num_cached = len(table) * self.block_size
        num_cached += self._pull(params, prompt, table, num_cached)
        request_id = f"request-{next(self._numbers)}"
        # The last prompt token is computed even if everything else is there.
        computed_from = min(num_cached, len(prompt) - 1)
        kv = self.memory.read(table, computed_from - 1) if computed_from else seed
        for position in range(computed_from, len(prompt)):
            kv = next_kv(kv, prompt[position])
            if position >= num_cached:
                self.memory.write(table, kv, position)
        output: list[int] = []
        while len(output) < max_tokens:
            token = _sample(kv)
            output.append(token)
            if token == IM_END or len(output) == max_tokens:
                break  # the last sampled token's KV is never computed
            kv = next_kv(kv, token)
            self.memory.write(table, kv, len(prompt) + len(output) - 1)
        retained = [*prompt, *output][: len(prompt) + len(output) - 1]
        self.memory.file(seed, retained, table)
        finish = "stop" if output[-1] == IM_END else "length"
        given = self._keep(request_id, params, table, len(retained), num_cached)
        return Served(prompt, output, finish, given, num_cached)

    def _pull(self, params: dict[str, Any], prompt: list[int], table: list[int], local: int) -> int:
        """Read remote blocks as vLLM does: the last so many of the list, comparing nothing."""
        blocks = params.get("remote_block_ids")
        from_prefill = bool(params.get("do_remote_prefill"))
        if from_prefill and not blocks:
            self._die()
        if not blocks:
            return 0
        # P -> D: everything; D -> P: what D says it has.
        offered = len(prompt) if from_prefill else params["remote_num_tokens"]
        num_tokens = min(offered, len(prompt)) - local
        producer = self.fabric.engines.get(params["remote_engine_id"])
        below = not from_prefill and num_tokens < PULL_THRESHOLD
        if num_tokens <= 0 or below:
            if producer is not None:
                producer.notified(params["remote_request_id"])
            return 0
        if producer is None:
            raise RefusedError(500)
        expiry_s = params.get("remote_blocks_expiry_time")
        if expiry_s is not None and expiry_s - EXPIRY_MARGIN_S <= producer._now():
            raise RefusedError(500)
        needed = -(-num_tokens // self.block_size)
        if needed > len(blocks[0]):
            self._die()
        producer.memory.expire(producer._now())
        for index, remote in enumerate(blocks[0][-needed:]):
            block = self.memory.allocate()
            wanted = min(self.block_size, num_tokens - index * self.block_size)
            self.memory.blocks[block].kv = list(producer.memory.blocks[remote].kv[:wanted])
            table.append(block)
        self.fabric.read_tokens += num_tokens
        producer.notified(params["remote_request_id"])
        return num_tokens

    def notified(self, request_id: str) -> None:
        """A reader is done with (or declines) this request's blocks."""
        if not self.memory.unpin(request_id):
            self.late_notices += 1

    def _keep(
        self,
        request_id: str,
        params: dict[str, Any],
        table: list[int],
        num_tokens: int,
        num_cached: int,
    ) -> dict[str, Any] | None:
        if not params:
            self.memory.release(table)
            return None
        is_prefill = bool(params.get("do_remote_decode"))
        ends_s = self._now() + (30.0 if is_prefill else self.ttl_s)
        self.memory.pins[request_id] = Pin(table, ends_s)
        given: dict[str, Any] = {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "remote_block_ids": [[*table, *([0] * self.extra_exported_blocks)]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None if is_prefill else ends_s,
            "transfer_mode": "pull",
        }
        if is_prefill:
            given["remote_prefill_cached_tokens"] = num_cached
        return given

    def abort(self, served: Served) -> None:
        """The request ended as an abort: nothing is kept."""
        if served.params is not None:
            self.memory.unpin(served.params["remote_request_id"])
            served.params = None

    def _die(self) -> None:
        self.dead = True
        raise RefusedError(500, "EngineCore encountered an issue")


def reference_answer(prompt: list[int], max_tokens: int, salt: str = "") -> list[int]:
    """The answer of an engine that computed everything."""
    kv = chain(START + salt.encode(), prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(_sample(kv))
        if output[-1] == IM_END:
            break
        kv = next_kv(kv, output[-1])
    return output


def _sample(kv: bytes) -> int:
    """Greedy: letters, and now and then the end."""
    number = int.from_bytes(kv, "little")
    return IM_END if number % 61 == 0 else ord("a") + number // 61 % 26
