"""The policy `pull-threshold`: take turns between P, stay with D, pull what is worth it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloop.policy.route import (
    Append,
    Claim,
    DecodeNode,
    NoUsableNodeError,
    PrefillNode,
    Pull,
    Pullable,
    Recompute,
    Route,
    TurnView,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_THRESHOLD_TOKENS = 64
"""vLLM's own `kv_recompute_threshold`: below it P computes rather than pulls."""


@dataclass(frozen=True, slots=True)
class PullThreshold:
    """Pull if P would gain at least ``threshold_tokens`` over what it likely holds itself."""

    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS

    def decide(self, view: TurnView) -> Route:
        """See :class:`kvloop.policy.route.Policy`."""
        decode = _sticky(view)
        if view.without_prefill is not None:
            return Append(decode.name, view.without_prefill)
        if not view.prefills:
            raise NoUsableNodeError("no prefill node is usable")
        prefill = view.prefills[view.turn_number % len(view.prefills)]
        holders = _holders(view, prefill, decode)
        if holders:
            return Claim(prefill.name, decode.name, holders, "claim")
        if not view.pullables:
            return Recompute(prefill.name, decode.name, "nothing_proven")
        if not prefill.can_pull:
            return Recompute(prefill.name, decode.name, "prefill_cannot_pull")
        pullables = [one for one in view.pullables if one.decode not in prefill.barred]
        if not pullables:
            return Recompute(prefill.name, decode.name, "pair_off")
        best = self._worth_it(prefill, pullables)
        if best is None:
            return Recompute(prefill.name, decode.name, "below_threshold")
        return Pull(prefill.name, decode.name, best.reference_id, best.num_tokens, "proven")

    def _worth_it(self, prefill: PrefillNode, pullables: Sequence[Pullable]) -> Pullable | None:
        best = max(pullables, key=lambda pullable: pullable.num_tokens)
        gained = best.num_tokens - prefill.held_tokens
        return best if gained >= self.threshold_tokens else None


def _holders(view: TurnView, prefill: PrefillNode, decode: DecodeNode) -> tuple[str, ...]:
    """Whom to ask: where the conversation lives, then where it will be answered."""
    if not view.may_claim or not prefill.claims:
        return ()
    granting = {node.name for node in view.decodes if node.grants} - prefill.barred
    return tuple(name for name in dict.fromkeys((view.home, decode.name)) if name in granting)


def _sticky(view: TurnView) -> DecodeNode:
    """The conversation's decode node if it is usable, else the next in turn."""
    if not view.decodes:
        raise NoUsableNodeError("no decode node is usable")
    for decode in view.decodes:
        if decode.name == view.home:
            return decode
    return view.decodes[view.turn_number % len(view.decodes)]
