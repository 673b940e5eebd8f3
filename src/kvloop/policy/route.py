"""The words of a decision: what the policy is shown, and the route that it picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class PrefillNode:
    """A usable prefill node, as one turn sees it."""

    name: str
    held_tokens: int
    """Leading tokens of this prompt that it likely has in its own prefix cache."""
    can_pull: bool
    """False if it is known not to run with `bidirectional_kv_xfer`: a pull would wait for ever."""
    barred: frozenset[str] = frozenset()
    """Decode nodes that it must not read from now."""
    claims: bool = False
    """Whether it can ask decode nodes for what they hold."""


@dataclass(frozen=True, slots=True)
class DecodeNode:
    """A usable decode node."""

    name: str
    grants: bool = False
    """Whether it can be asked for what it holds, and pins nothing."""


@dataclass(frozen=True, slots=True)
class Pullable:
    """A reference that could be attached to this prompt."""

    reference_id: int
    decode: str
    num_tokens: int
    """Proven tokens in whole blocks: what would be attached."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """Everything a policy may know of a turn when it decides."""

    turn_number: int
    """Counts the router's turns: lets a pure policy take turns between nodes."""
    prompt_tokens: int | None
    """None where no renderer told us."""
    prefills: tuple[PrefillNode, ...]
    decodes: tuple[DecodeNode, ...]
    pullables: tuple[Pullable, ...] = ()
    """Most tokens first. Empty where reuse is off or nothing is proven."""
    home: str | None = None
    """Decode node of the conversation's last turn."""
    may_claim: bool = False
    """Whether this turn may read what decode nodes hold of its prompt."""
    without_prefill: str | None = None
    """The reason why P and D cannot share this request's prompt, if they cannot."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """P computes the whole prompt."""

    prefill: str
    decode: str
    why: str
    kind: str = "recompute"


@dataclass(frozen=True, slots=True)
class Pull:
    """P reads a proven prefix from a decode node and computes the rest."""

    prefill: str
    decode: str
    reference_id: int
    num_tokens: int
    why: str
    kind: str = "pull"


@dataclass(frozen=True, slots=True)
class Claim:
    """P asks decode nodes which prefix of the prompt they hold, reads that, computes the rest."""

    prefill: str
    decode: str
    holders: tuple[str, ...]
    """Decode nodes to ask, best first."""
    why: str
    kind: str = "pull"


@dataclass(frozen=True, slots=True)
class Append:
    """D computes what it lacks by itself; no P takes part."""

    decode: str
    why: str
    kind: str = "append"


Route: TypeAlias = Recompute | Pull | Claim | Append


class NoUsableNodeError(Exception):
    """No prefill or no decode node can take this turn; says which."""


class Policy(Protocol):
    """Picks a route. Must be pure: equal views give equal routes."""

    def decide(self, view: TurnView) -> Route:
        """Raises NoUsableNodeError when the view has no node that could serve the turn."""
        ...
