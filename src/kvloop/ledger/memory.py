"""The ledger in this process's memory: filing, finding, claiming once, dropping.

Every method is one synchronous step, so on one event loop each is atomic. Whatever falls out of
the ledger unclaimed while D still pins it is handed back to the caller, who can have D release it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloop.ledger.reference import ClaimedReference, KVReference, same_life
from kvloop.ledger.retention import RetentionOrder
from kvloop.proof.fingerprint import UNIT_TOKENS, common_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvloop.proof.chain import ChainKey
    from kvloop.proof.fingerprint import Prefixes

MAX_AT_ONE_BOUNDARY = 32
"""Conversations that look alike so far (samples of one prompt, say) are told apart by their
tokens; of more than this many only the latest are looked at."""
DEFAULT_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A reference that the ledger found, and how much of a prompt it provably covers."""

    reference: KVReference
    common_tokens: int

    @property
    def is_continued(self) -> bool:
        """Whether the prompt starts with everything that is known to be behind the reference."""
        return self.common_tokens == len(self.reference.prefixes) * UNIT_TOKENS


@dataclass(frozen=True, slots=True)
class Found:
    """What the ledger knows of a prompt's conversation."""

    home: str | None
    """Decode node of the conversation's last turn."""
    candidates: tuple[Candidate, ...]
    """Claimable references, most proven tokens first."""
    continued_home: int | None = None
    """The entry that says so, where this prompt goes on from its very end."""


NOTHING_FOUND = Found(home=None, candidates=())


class _Entry:
    """A filed reference; it stays as the conversation's home when the reference is gone."""

    __slots__ = ("boundaries", "conversation", "decode", "entry_id", "reference")

    def __init__(
        self,
        entry_id: int,
        decode: str,
        boundaries: tuple[ChainKey, ...],
        conversation: str | None,
        reference: KVReference | None,
    ) -> None:
        self.entry_id = entry_id
        self.reference = reference
        self.decode = decode
        self.boundaries = boundaries
        self.conversation = conversation


class Ledger:
    """KV references by conversation, bounded in number and bytes; the oldest go first."""

    def __init__(self, max_entries: int, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_entries < 1:
            raise ValueError(f"a ledger needs room for at least one entry, got {max_entries}")
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        # Almost every key has one entry: the bare id saves a container a million times over.
        self._by_boundary: dict[ChainKey, int | list[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._orders: dict[str, RetentionOrder] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def next_id(self) -> int:
        """A reference id that was never given before."""
        return next(self._ids)

    @property
    def num_bytes(self) -> int:
        """Memory that the references take, roughly."""
        return self._bytes

    def file(
        self, reference: KVReference, supersedes: Iterable[int] = ()
    ) -> list[ClaimedReference]:
        """Keep ``reference``; drop the conversation's earlier ones named in ``supersedes``.

        Returns references that fell out unclaimed: to be released.
        """
        entry = _Entry(
            reference.reference_id,
            reference.decode,
            reference.boundaries,
            reference.conversation,
            reference,
        )
        self._bytes += reference.num_bytes
        self._order(reference.decode).add(
            reference.reference_id, reference.num_tokens, continued=reference.continued
        )
        heapq.heappush(self._deadlines, (reference.deadline_s, reference.reference_id))
        return self._enter(entry, supersedes)

    def file_home(
        self,
        decode: str,
        boundaries: tuple[ChainKey, ...],
        conversation: str | None,
        supersedes: Iterable[int] = (),
    ) -> list[ClaimedReference]:
        """Keep where a conversation lives, and no reference: who holds its KV can be asked."""
        entry = _Entry(self.next_id(), decode, boundaries, conversation, None)
        return self._enter(entry, supersedes)

    def _enter(self, entry: _Entry, supersedes: Iterable[int]) -> list[ClaimedReference]:
        released = [claimed for old in supersedes if (claimed := self._remove(old)) is not None]
        self._entries[entry.entry_id] = entry
        for key in entry.boundaries:
            self._link(key, entry.entry_id)
        while self._is_over():
            evicted = self._remove(next(iter(self._entries)))
            if evicted is not None:
                released.append(evicted)
        return released

    def evict(self, decode: str, num_tokens: int) -> list[ClaimedReference]:
        """Give up what is least likely to be claimed until a decode node can free that much."""
        victims = self._order(decode).victims(num_tokens)
        taken = [self._take(self._entries[reference_id]) for reference_id in victims]
        return [claimed for claimed in taken if claimed is not None]

    def find(
        self,
        boundaries: Sequence[ChainKey],
        prefixes: Prefixes,
        now_s: float,
        conversation: str | None = None,
    ) -> Found:
        """Look a prompt up by its boundaries (shortest first) and prove what is found.

        The longest boundary at which any reference was filed decides. ``conversation``, the
        client's own id, narrows: references filed under another id are not offered.
        """
        self._expire(now_s)
        home: str | None = None
        continued: int | None = None
        for key in reversed(boundaries):
            entries = [
                entry
                for entry in self._at(key)
                if conversation is None or entry.conversation == conversation
            ]
            if home is None and entries:
                home = entries[-1].decode
                if entries[-1].boundaries[-1] == key:
                    continued = entries[-1].entry_id
            live = [entry.reference for entry in entries if entry.reference is not None]
            if live:
                return Found(home, _prove(live, prefixes), continued)
        return Found(home, (), continued)

    def claim(self, reference_id: int, now_s: float) -> ClaimedReference | None:
        """Take a reference for one use; None if it was claimed, dropped or has expired."""
        self._expire(now_s)
        entry = self._entries.get(reference_id)
        return self._take(entry) if entry is not None else None

    def drop_engine(self, decode: str, keep_engine_id: str | None = None) -> list[ClaimedReference]:
        """Forget what a decode node held in an earlier life; returns the references that died.

        ``keep_engine_id``: the engine that runs there now, if known.
        """
        doomed = [
            reference_id
            for reference_id in self._order(decode).ids()
            if not self._is_of(reference_id, keep_engine_id)
        ]
        taken = [self._remove(reference_id) for reference_id in doomed]
        return [claimed for claimed in taken if claimed is not None]

    def drain(self) -> list[ClaimedReference]:
        """Take everything out: the router is going down and its pins are of no more use."""
        taken = [self._take(entry) for entry in self._entries.values()]
        self._entries.clear()
        self._by_boundary.clear()
        self._deadlines.clear()
        return [claimed for claimed in taken if claimed is not None]

    def _is_over(self) -> bool:
        return len(self._entries) > self._max_entries or (
            self._bytes > self._max_bytes and len(self._entries) > 1
        )

    def _is_of(self, reference_id: int, engine_id: str | None) -> bool:
        reference = self._entries[reference_id].reference
        return (
            engine_id is not None
            and reference is not None
            and same_life(reference.engine_id, engine_id)
        )

    def _order(self, decode: str) -> RetentionOrder:
        return self._orders.setdefault(decode, RetentionOrder())

    def _at(self, key: ChainKey) -> Iterator[_Entry]:
        ids = self._by_boundary.get(key)
        if ids is None:
            return
        for reference_id in (ids,) if isinstance(ids, int) else ids:
            yield self._entries[reference_id]

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, reference_id = heapq.heappop(self._deadlines)
            entry = self._entries.get(reference_id)
            if entry is not None:
                self._take(entry)

    def _take(self, entry: _Entry) -> ClaimedReference | None:
        """Turn an entry into a mere home; the reference leaves the ledger."""
        reference = entry.reference
        if reference is None:
            return None
        entry.reference = None
        self._bytes -= reference.num_bytes
        self._order(reference.decode).discard(reference.reference_id)
        return ClaimedReference(reference)

    def _remove(self, reference_id: int) -> ClaimedReference | None:
        entry = self._entries.pop(reference_id, None)
        if entry is None:
            return None
        for key in entry.boundaries:
            self._unlink(key, reference_id)
        return self._take(entry)

    def _link(self, key: ChainKey, reference_id: int) -> None:
        ids = self._by_boundary.get(key)
        if ids is None:
            self._by_boundary[key] = reference_id
        elif isinstance(ids, int):
            self._by_boundary[key] = [ids, reference_id]
        else:
            ids.append(reference_id)
            if len(ids) > MAX_AT_ONE_BOUNDARY:
                del ids[0]  # still filed under the boundaries that only it has

    def _unlink(self, key: ChainKey, reference_id: int) -> None:
        ids = self._by_boundary.get(key)
        if isinstance(ids, list):
            if reference_id in ids:
                ids.remove(reference_id)
            if len(ids) == 1:
                self._by_boundary[key] = ids[0]
        elif ids == reference_id:
            del self._by_boundary[key]


def _prove(references: Sequence[KVReference], prefixes: Prefixes) -> tuple[Candidate, ...]:
    candidates = [
        Candidate(reference, common_tokens(reference.prefixes, prefixes))
        for reference in references
    ]
    candidates.sort(key=lambda candidate: candidate.common_tokens, reverse=True)
    return tuple(candidates)
