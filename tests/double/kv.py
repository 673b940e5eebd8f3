"""One engine's KV memory: block tables, prefix cache, pins. No I/O; the clock is passed in.

The KV of a token is a hash of the KV before it *as it lies in the request's own blocks* and of the
token. Whoever attaches wrong blocks computes on from wrong KV, answers from it, and files it in the
prefix cache under the right tokens' hash, where it poisons others.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

RUBBISH = 0x0BAD
_MASK = (1 << 61) - 1


def seed_of(identity: str) -> int:
    """Where the KV of an identity's prompts starts."""
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


class Seed(NamedTuple):
    """Where an identity's prompts start: their KV, and the hashes under which it is cached."""

    kv: int
    hashes: int


def next_kv(before: int, token: int) -> int:
    """KV of ``token`` after KV ``before``: a hash, and the same one in every process."""
    return hash((before, token)) & _MASK


def chain(seed: int, token_ids: Iterable[int]) -> int:
    """KV of the last of ``token_ids``, computed from nothing."""
    kv = seed
    for token in token_ids:
        kv = hash((kv, token)) & _MASK
    return kv


@lru_cache(1 << 17)
def _block_chain(seed: int, token_ids: tuple[int, ...]) -> int:
    """:func:`chain` over one block: the same blocks come again and again."""
    return chain(seed, token_ids)


@dataclass
class Block:
    """Physical memory: what was last written stays until it is overwritten."""

    kv: list[int] = field(default_factory=list)


@dataclass
class Pin:
    """Blocks kept for a reader, until it has read them or the time is over.

    An untracked pin is vLLM's leak: the worker has never heard of the request, so neither a
    reader's notice nor the time ends it.
    """

    blocks: list[int]
    ends_s: float
    num_tokens: int = 0
    tracked: bool = True
    origin: str = ""
    """The client's request id."""


class OutOfBlocksError(Exception):
    """No free block: requests and pins hold the rest."""


class KVMemory:
    """Blocks, who owns them, and what is cached."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self.blocks = [Block() for _ in range(num_blocks)]
        # In the order in which they are taken; what is cached stays so until its block is taken.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[int, int] = {}
        self.hash_of: dict[int, int] = {}
        self.users = [0] * num_blocks
        self.pins: dict[str, Pin] = {}
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.poisoned = 0
        """Blocks that were cached under the hash of tokens that are not in them."""

    def blocks_for(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.block_size)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self.free)

    # Pins

    def pin(self, request_id: str, pin: Pin) -> None:
        self.pins[request_id] = pin

    def expire(self, now_s: float) -> int:
        """End the pins whose time is over; how many there were."""
        over = [key for key, pin in self.pins.items() if pin.tracked and pin.ends_s <= now_s]
        for request_id in over:
            self.unpin(request_id)
        return len(over)

    def unpin(self, request_id: str) -> bool:
        """Free a pin's blocks; False if there is none (any more) or nobody may."""
        pin = self.pins.get(request_id)
        if pin is None or not pin.tracked:
            return False
        del self.pins[request_id]
        self.release(pin.blocks)
        return True

    # Blocks

    def allocate(self) -> int:
        """The first free block. What lies in it lies there until it is overwritten."""
        if not self.free:
            raise OutOfBlocksError
        block, _ = self.free.popitem(last=False)
        known_as = self.hash_of.pop(block, None)
        if known_as is not None:
            self.cached.pop(known_as, None)
        self.users[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        """What is cached waits its turn, the end of a sequence first; the rest is taken next."""
        uncached: list[int] = []
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                if block in self.hash_of:
                    self.free[block] = None
                else:
                    uncached.append(block)
        for block in reversed(uncached):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def copy_in(self, table: list[int], remote: KVMemory, remote_block: int) -> None:
        """One block over the wire, whatever it holds by now."""
        block = self.allocate()
        self.blocks[block].kv = list(remote.blocks[remote_block].kv)
        table.append(block)

    def is_chain(self, seed: Seed, token_ids: list[int], table: list[int]) -> bool:
        """Whether the first positions hold what these tokens make of ``seed``."""
        kv, size = seed.kv, self.block_size
        for number in range(self.blocks_for(len(token_ids))):
            tokens = token_ids[number * size : (number + 1) * size]
            held = self.blocks[table[number]].kv
            if len(held) < len(tokens):
                return False
            for token, found in zip(tokens, held, strict=False):
                kv = next_kv(kv, token)
                if found != kv:
                    return False
        return True

    def write(self, table: list[int], kv: int, position: int) -> None:
        number, offset = divmod(position, self.block_size)
        if number == len(table):
            table.append(self.allocate())
        held = self.blocks[table[number]].kv
        held.extend([RUBBISH] * (offset + 1 - len(held)))
        held[offset] = kv

    def read(self, table: list[int], position: int) -> int:
        """What lies at a position; rubbish where nothing was ever written."""
        number, offset = divmod(position, self.block_size)
        held = self.blocks[table[number]].kv
        return held[offset] if offset < len(held) else RUBBISH

    # Prefix cache

    def lookup(self, seed: Seed, token_ids: list[int]) -> list[int]:
        """Cached leading blocks of a prompt. At least one token is always left to compute."""
        found: list[int] = []
        if self.prefix_caching:
            for known_as in self._hashes(seed, token_ids[:-1]):
                block = self.cached.get(known_as)
                if block is None:
                    break
                found.append(block)
        return found

    def hit(self, seed: Seed, token_ids: list[int]) -> list[int]:
        """As :meth:`lookup`, taken into use and counted."""
        found = self.lookup(seed, token_ids)
        for block in found:
            self.free.pop(block, None)
            self.users[block] += 1
        if self.prefix_caching:
            self.queried_tokens += len(token_ids)
            self.hit_tokens += len(found) * self.block_size
        return found

    def shortage(self, seed: Seed, prompt: list[int], num_tokens: int, promised: int) -> int:
        """Blocks lacking for a request of ``num_tokens`` beside those promised to others."""
        found = self.lookup(seed, prompt)
        free = len(self.free) - sum(block in self.free for block in found)
        return self.blocks_for(num_tokens) + promised - len(found) - free

    def file(self, seed: Seed, token_ids: list[int], table: list[int]) -> None:
        """File a request's full blocks under what their tokens *should* have made of them."""
        if not self.prefix_caching:
            return
        hashes, truths = self._hashes(seed, token_ids), self._truths(seed, token_ids)
        for known_as, truth, block in zip(hashes, truths, table, strict=False):
            if known_as not in self.cached and block not in self.hash_of:
                self.cached[known_as] = block
                self.hash_of[block] = known_as
                self.poisoned += self.read([block], self.block_size - 1) != truth

    def _hashes(self, seed: Seed, token_ids: list[int]) -> list[int]:
        known_as, hashes, size = seed.hashes, [], self.block_size
        for start in range(0, len(token_ids) // size * size, size):
            known_as = _block_chain(known_as, tuple(token_ids[start : start + size]))
            hashes.append(known_as)
        return hashes

    def _truths(self, seed: Seed, token_ids: list[int]) -> list[int]:
        """KV that the last token of each full block should have."""
        kv, truths, size = seed.kv, [], self.block_size
        for start in range(0, len(token_ids) // size * size, size):
            kv = _block_chain(kv, tuple(token_ids[start : start + size]))
            truths.append(kv)
        return truths
