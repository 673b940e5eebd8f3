"""The policy pull-threshold: turns between P, stays with D, pulls what is worth it."""

import pytest

from kvloop.policy.pull_threshold import PullThreshold
from kvloop.policy.route import (
    Append,
    DecodeNode,
    NoUsableNodeError,
    PrefillNode,
    Pull,
    Pullable,
    Recompute,
    TurnView,
)


def prefill(name: str = "p", held_tokens: int = 0, *, can_pull: bool = True) -> PrefillNode:
    return PrefillNode(name, held_tokens, can_pull)


def view(**fields) -> TurnView:  # type: ignore[no-untyped-def]
    defaults = {
        "turn_number": 0,
        "prompt_tokens": 1000,
        "prefills": (prefill(),),
        "decodes": (DecodeNode("d1"), DecodeNode("d2")),
    }
    return TurnView(**{**defaults, **fields})


def test_prefill_nodes_take_turns() -> None:
    nodes = (prefill("p1"), prefill("p2"), prefill("p3"))
    chosen = [PullThreshold().decide(view(prefills=nodes, turn_number=n)).prefill for n in range(4)]
    assert chosen == ["p1", "p2", "p3", "p1"]


def test_a_conversation_stays_with_its_decode_node() -> None:
    routes = [PullThreshold().decide(view(home="d2", turn_number=n)) for n in range(3)]
    assert {route.decode for route in routes} == {"d2"}


def test_a_conversation_whose_decode_node_is_gone_moves() -> None:
    assert PullThreshold().decide(view(home="d9")).decode == "d1"


@pytest.mark.parametrize(
    ("proven", "held", "pulled"),
    [(64, 0, True), (63, 0, False), (1000, 937, False), (1000, 936, True), (500, 900, False)],
)
def test_what_counts_is_the_gain_over_what_the_prefill_node_holds(
    proven: int, held: int, pulled: bool
) -> None:
    route = PullThreshold(64).decide(
        view(prefills=(prefill(held_tokens=held),), pullables=(Pullable(1, "d1", proven),))
    )
    if pulled:
        assert route == Pull("p", "d1", 1, proven, "proven")
    else:
        assert route == Recompute("p", "d1", "below_threshold")


def test_k26_a_prefill_node_that_cannot_pull_computes() -> None:
    route = PullThreshold().decide(
        view(prefills=(prefill(can_pull=False),), pullables=(Pullable(1, "d1", 900),))
    )
    assert route == Recompute("p", "d1", "prefill_cannot_pull")


def test_the_best_of_several_references_is_pulled() -> None:
    route = PullThreshold().decide(
        view(pullables=(Pullable(1, "d1", 100), Pullable(2, "d2", 300), Pullable(3, "d1", 200)))
    )
    assert isinstance(route, Pull)
    assert route.reference_id == 2


def test_what_p_and_d_cannot_share_goes_to_d_alone() -> None:
    route = PullThreshold().decide(view(without_prefill="several_sequences", prefills=()))
    assert route == Append("d1", "several_sequences")


@pytest.mark.parametrize("missing", ["prefills", "decodes"])
def test_a_missing_role_is_named(missing: str) -> None:
    with pytest.raises(NoUsableNodeError, match=missing[:-1]):
        PullThreshold().decide(view(**{missing: ()}))
