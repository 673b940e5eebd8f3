"""One engine's KV memory: block tables, prefix cache, pins. No I/O; the clock is passed in.

The KV of a token is a hash of the KV before it *as it lies in the request's own blocks* and of the
token. Whoever attaches wrong blocks computes on from wrong KV, answers from it, and files it in the
prefix cache under the right tokens' hash, where it poisons others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

START = b"start"


def next_kv(before: bytes, token: int) -> bytes:
    """KV of ``token`` after KV ``before``."""
    return hashlib.blake2b(before + token.to_bytes(8, "little"), digest_size=8).digest()


def chain(seed: bytes, token_ids: list[int]) -> bytes:
    """KV of the last of ``token_ids``, computed from nothing."""
    kv = seed
    for token in token_ids:
        kv = next_kv(kv, token)
    return kv


@dataclass
class Block:
    """Physical memory: what was last written stays until it is overwritten."""

    kv: list[bytes] = field(default_factory=list)


@dataclass
class Pin:
    """Blocks kept for a reader, until it has read them or the time is over."""

    blocks: list[int]
    ends_s: float


class OutOfBlocksError(Exception):
    """No free block: pins hold the rest."""


class KVMemory:
    """Blocks, who owns them, and what is cached."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.users = [0] * num_blocks
        self.pins: dict[str, Pin] = {}

    def expire(self, now_s: float) -> None:
        for request_id in [key for key, pin in self.pins.items() if pin.ends_s <= now_s]:
            self.unpin(request_id)

    def unpin(self, request_id: str) -> bool:
        """Free a pin's blocks; False if there is none (any more)."""
        pin = self.pins.pop(request_id, None)
        if pin is None:
            return False
        self.release(pin.blocks)
        return True

    def allocate(self) -> int:
        if not self.free:
            raise OutOfBlocksError
        block, _ = self.free.popitem(last=False)
        known_as = self.hash_of.pop(block, None)
        if known_as is not None:
            self.cached.pop(known_as, None)
        self.blocks[block] = Block()
        self.users[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free[block] = None

    def hit(self, seed: bytes, token_ids: list[int]) -> list[int]:
        """Cached leading blocks of a prompt, taken into use."""
        found: list[int] = []
        if not self.prefix_caching:
            return found
        for known_as in self._hashes(seed, token_ids[:-1]):
            block = self.cached.get(known_as)
            if block is None:
                break
            self.free.pop(block, None)
            self.users[block] += 1
            found.append(block)
        return found

    def file(self, seed: bytes, token_ids: list[int], table: list[int]) -> None:
        """File a request's full blocks under what their tokens should be."""
        if self.prefix_caching:
            for known_as, block in zip(self._hashes(seed, token_ids), table, strict=False):
                if known_as not in self.cached and block not in self.hash_of:
                    self.cached[known_as] = block
                    self.hash_of[block] = known_as

    def write(self, table: list[int], kv: bytes, position: int) -> None:
        if position // self.block_size == len(table):
            table.append(self.allocate())
        self.blocks[table[position // self.block_size]].kv.append(kv)

    def read(self, table: list[int], position: int) -> bytes:
        """What lies at a position; rubbish where nothing was written."""
        held = self.blocks[table[position // self.block_size]].kv
        offset = position % self.block_size
        return held[offset] if offset < len(held) else b"rubbish"

    def _hashes(self, seed: bytes, token_ids: list[int]) -> list[bytes]:
        kv, hashes = seed + b"hash", []
        for start in range(0, len(token_ids) // self.block_size * self.block_size, self.block_size):
            kv = chain(kv, token_ids[start : start + self.block_size])
            hashes.append(kv)
        return hashes
