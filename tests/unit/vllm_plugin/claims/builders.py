"""A block pool like vLLM's, and terms that agree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloop.vllm_plugin.claims.messages import PROTOCOL_VERSION, Claim, Terms

TERMS = Terms("sha256", b"seed", 32, 1, "compatible")


@dataclass
class FakeBlock:
    """A block of one KV cache group."""

    block_id: int
    ref_cnt: int = 0


@dataclass
class FakePool:
    """Cached blocks by hash; those that nobody holds may be evicted, the oldest first."""

    cached: dict[bytes, FakeBlock] = field(default_factory=dict)
    free: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def cache(self, block_hash: bytes) -> FakeBlock:
        block = FakeBlock(len(self.cached))
        self.cached[block_hash] = block
        self.free[block.block_id] = None
        return block

    def evictable(self) -> set[int]:
        return set(self.free)

    def find(self, block_hash: bytes) -> Sequence[FakeBlock] | None:
        block = self.cached.get(block_hash)
        return None if block is None else [block]

    def hold(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            self.free.pop(block.block_id, None)
            block.ref_cnt += 1

    def let_go(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free[block.block_id] = None


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in numbers]


def pool_of(*numbers: int) -> FakePool:
    pool = FakePool()
    for block_hash in hashes(*numbers):
        pool.cache(block_hash)
    return pool


def claim(
    claim_id: bytes = b"claim-1",
    numbers: Sequence[int] = (1, 2, 3),
    *,
    terms: Terms = TERMS,
    version: int = PROTOCOL_VERSION,
    lease_ms: int = 5000,
) -> Claim:
    return Claim(version, claim_id, "engine-p", terms, 0, hashes(*numbers), lease_ms)
