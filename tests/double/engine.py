"""The engine: prompts in, answers out, references as vLLM 0.32 gives and takes them.

Knobs are plain attributes, to be changed at any time; engines find each other through a
:class:`Fabric`. Nothing here knows of HTTP: see :mod:`tests.double.http`.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from tests.double import transfer
from tests.double.exchange import ORIGIN
from tests.double.fabric import DiedError, Fabric, HangError, LoadFailedError, RefusedError
from tests.double.kv import KVMemory, OutOfBlocksError, Seed, next_kv
from tests.double.sampler import PLAIN, Style, identity_seed, reference_answer, sample
from tests.double.tokens import IM_END

__all__ = [
    "PLAIN",
    "DiedError",
    "Engine",
    "Fabric",
    "HangError",
    "LoadFailedError",
    "OutOfBlocksError",
    "Received",
    "RefusedError",
    "Sequence",
    "Style",
    "free_blocks",
    "pinned_tokens",
    "reference_answer",
]


class Received(NamedTuple):
    """One request as it came in."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass
class Counters:
    """What ``/metrics`` counts, besides the memory."""

    transfers: int = 0
    bytes_read: int = 0
    failed_transfers: int = 0
    expired_requests: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


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
        model: str = "double",
    ) -> None:
        self.fabric = fabric
        self.block_size, self.num_blocks = block_size, num_blocks
        self.prefix_caching, self.plugin, self.ttl_s = prefix_caching, plugin, ttl_s
        self.model = model
        self.requests: list[Received] = []
        """Generation requests; ``calls`` has all."""
        self.calls: list[Received] = []
        # How it was started
        self.adapters: set[str] = set()
        self.bidirectional = True
        self.bytes_per_token = 1024
        self.claims = False
        self.clock_ahead_s = 12_345.0
        self.default_max_tokens = 64
        self.kv_load_failure_policy = "fail"
        self.kv_recompute_threshold = 64
        self.lease_s = 30.0
        self.max_model_len = 100_000
        self.poll_s = 0.002
        """Between two looks of a waiting request whether there is memory for it."""
        self.native_stream_reference = False
        self.renders = True
        self.reports_cached_tokens = False
        self.side_host, self.side_port = "127.0.0.1", next(fabric.ports)
        # What its model is like
        self.parses_output = False
        self.renders_tools = False
        self.strips_reasoning = False
        self.style = PLAIN
        # What goes wrong
        self.answer_delay_s = 0.0
        self.break_next = 0
        self.break_stream_after: int | None = None
        self.cut_stream: Callable[[bytes], list[bytes]] = lambda data: [data]
        self.drop_reference = False
        self.extra_exported_blocks = 0
        self.hold: asyncio.Event | None = None
        self.ignores_ids = False
        self.ignores_notices = False
        self.memory_timeout_s: float | None = None
        self.merge_events = 1
        self.pause_stream_after: int | None = None
        self.refuse_next: list[int] = []
        self.renders_differently = False
        """Its template stamps what it computes, and not what ``/render`` says."""
        self.spoils_reads = False
        """What it reads from others arrives as something else, and nobody is told."""
        self.token_delay_s = 0.0
        self.token_gate: asyncio.Semaphore | None = None
        # What became of it
        self.disconnects = 0
        self.started_s = 1.0
        self.num_waiting = 0
        self.several = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._begin_life()

    def _begin_life(self) -> None:
        self.engine_id = uuid.uuid4().hex
        self.dead = False
        self.late_notices = 0
        self.met: set[str] = set()
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.memory = KVMemory(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching)
        self.fabric.engines[self.engine_id] = self

    def restart(self) -> None:
        """Another process at the same address: nothing is kept."""
        del self.fabric.engines[self.engine_id]
        self.started_s += 1.0
        self._begin_life()

    @property
    def now_s(self) -> float:
        """Its own monotonic clock, whose zero means nothing to others."""
        return self.fabric.clock() + self.clock_ahead_s

    @property
    def pinned_blocks(self) -> int:
        self.expire()
        return sum(len(pin.blocks) for pin in self.memory.pins.values())

    def expire(self) -> None:
        self.counters.expired_requests += self.memory.expire(self.now_s)

    def notified(self, request_id: str) -> None:
        """A reader is done with (or declines) this request's blocks."""
        self.expire()
        if self.ignores_notices:
            return
        if not self.memory.unpin(request_id):
            self.late_notices += 1

    def die(self) -> NoReturn:
        self.dead = True
        raise DiedError

    def begin(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        salt: str = "",
        *,
        adapter: str = "",
        media: str = "",
        ignore_eos: bool = False,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> Sequence:
        """Schedule a request and compute its prompt.

        Raises OutOfBlocksError (nothing happened: wait), RefusedError and HangError.
        """
        if len(prompt) + max_tokens > min(self.max_model_len, self.num_blocks * self.block_size):
            raise RefusedError(400, f"the maximum context length is {self.max_model_len} tokens")
        self.expire()
        seed = identity_seed(salt, adapter, media)
        promised = sum(sequence.blocks_to_come for sequence in self.running)
        if self.memory.shortage(seed, prompt, len(prompt) + max_tokens, promised) > 0:
            raise OutOfBlocksError
        sequence = Sequence(
            self,
            request_id=f"request-{next(self._numbers)}",
            seed=seed,
            prompt=prompt,
            max_tokens=max_tokens,
            asked=dict(params) if params else {},
            ends=stop_token_ids if ignore_eos else stop_token_ids | {IM_END},
        )
        sequence.prefill()
        self.running.append(sequence)
        return sequence

    def serve(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        salt: str = "",
        **more: Any,
    ) -> Sequence:
        """One request from beginning to end; see :meth:`begin`."""
        sequence = self.begin(prompt, max_tokens, params, salt, **more)
        while not sequence.finish_reason:
            sequence.step()
        return sequence


class Sequence:
    """One request: what it asked, its blocks, and what became of it."""

    def __init__(
        self,
        engine: Engine,
        *,
        request_id: str,
        seed: Seed,
        prompt: list[int],
        max_tokens: int,
        asked: dict[str, Any],
        ends: frozenset[int],
    ) -> None:
        self.engine, self.memory = engine, engine.memory
        self.request_id, self.seed, self.origin = request_id, seed, ORIGIN.get()
        self.prompt, self.max_tokens, self.asked, self.ends = prompt, max_tokens, asked, ends
        self.table: list[int] = []
        self.output: list[int] = []
        self.num_computed = 0
        self.cached_tokens = 0
        self.wrong_kv = 0
        """Of what was loaded and is not its tokens' KV; 0 where all is right."""
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self.params: dict[str, Any] | None = None
        """The reference that it leaves."""

    @property
    def blocks_to_come(self) -> int:
        return self.memory.blocks_for(len(self.prompt) + self.max_tokens) - len(self.table)

    def prefill(self) -> None:
        """Local hit, remote read, and the rest computed upon what is then in the blocks."""
        engine, prompt = self.engine, self.prompt
        self.table = self.memory.hit(self.seed, prompt)
        self.num_computed = len(self.table) * engine.block_size
        try:
            self.num_computed += transfer.pull(engine, self.asked, prompt, self.table, self.seed)
        except LoadFailedError:
            if engine.kv_load_failure_policy == "recompute" and not engine.dead:
                self._recompute()
            else:
                self.memory.release(self.table)
                raise
        except (DiedError, HangError):
            self.memory.release(self.table)
            raise
        self.cached_tokens = self.num_computed
        self._attend(prompt[: self.num_computed])
        # The last prompt token is computed even if everything else is there.
        for position in range(min(self.num_computed, len(prompt) - 1), len(prompt)):
            self._compute(prompt[position], position)
        self.num_computed = len(prompt)
        self._file()
        engine.counters.prompt_tokens += len(prompt)
        reported = self.asked.get("remote_prefill_cached_tokens")
        if self.asked.get("do_remote_prefill") and isinstance(reported, int):
            self.cached_tokens = reported  # D says what P had

    def _recompute(self) -> None:
        """D computes what it could not read; P waits for a transfer that never comes again."""
        if self.asked.get("do_remote_decode"):
            self.memory.release(self.table)
            raise HangError

    def step(self) -> int:
        """The next token. Raises DiedError if the engine is gone."""
        if self.memory is not self.engine.memory or self.engine.dead:
            raise DiedError
        if self.output:
            self._compute(self.output[-1], self.num_computed)
            self.num_computed += 1
        kv = self.memory.read(self.table, self.num_computed - 1)
        token = sample(kv, len(self.output), self.engine.style)
        self.output.append(token)
        self.engine.counters.generation_tokens += 1
        if token in self.ends:
            self._finish("stop", None if token == IM_END else token)
        elif len(self.output) == self.max_tokens:
            self._finish("length", None)
        return token

    def abort(self) -> None:
        """End it as the API side does: nothing is kept.

        One that has finished is not touched any more (`Scheduler.finish_requests` passes it over):
        what it has pinned stays pinned, though nobody may have been told.
        """
        if not self.finish_reason and self in self.engine.running:
            self.engine.running.remove(self)
            self._file()
            self.memory.release(self.table)
        self.finish_reason = self.finish_reason or "abort"

    def _attend(self, loaded: list[int]) -> None:
        """What is computed from here on comes from *every* position loaded, not the last alone."""
        if not self.memory.is_chain(self.seed, loaded, self.table):
            held = (self.memory.read(self.table, position) for position in range(len(loaded)))
            self.wrong_kv = hash(tuple(held)) | 1

    def _compute(self, token: int, position: int) -> None:
        before = self.memory.read(self.table, position - 1) if position else self.seed.kv
        self.memory.write(self.table, next_kv(before ^ self.wrong_kv, token), position)

    def _file(self) -> None:
        computed = [*self.prompt, *self.output][: self.num_computed]
        self.memory.file(self.seed, computed, self.table)

    def _finish(self, reason: str, stop_reason: int | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.engine.running.remove(self)
        self._file()
        self.params = transfer.keep(self.engine, self)


def pinned_tokens(engine: Engine) -> int:
    """Tokens whose KV is held for a reader."""
    engine.expire()
    return sum(pin.num_tokens for pin in engine.memory.pins.values())


def free_blocks(engine: Engine) -> int:
    """Blocks that a request could take now, cached ones included."""
    engine.expire()
    return len(engine.memory.free)
