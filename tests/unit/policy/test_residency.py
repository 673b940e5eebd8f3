"""Residency: what a prefill node was sent lately, up to its capacity."""

from kvloop.policy.residency import STRIDE_TOKENS, Residency
from tests.builders import FINGERPRINTER

ONE = FINGERPRINTER.prefixes(list(range(1000)))
OTHER = FINGERPRINTER.prefixes(list(range(5000, 6000)))
WHOLE = 1000 // STRIDE_TOKENS * STRIDE_TOKENS


def test_a_served_prompt_is_held() -> None:
    residency = Residency(10_000)
    assert residency.held_tokens(ONE) == 0
    residency.served(ONE)
    assert residency.held_tokens(ONE) == WHOLE
    assert residency.held_tokens(OTHER) == 0


def test_a_prompt_that_branches_is_held_up_to_the_branch() -> None:
    residency = Residency(10_000)
    residency.served(ONE)
    branch = FINGERPRINTER.prefixes([*range(500), *range(7000, 7500)])
    assert residency.held_tokens(branch) == 500 // STRIDE_TOKENS * STRIDE_TOKENS


def test_the_tail_of_the_least_recent_prompt_goes_first() -> None:
    residency = Residency(1500)
    residency.served(ONE)
    residency.served(OTHER)
    assert residency.held_tokens(OTHER) == WHOLE
    assert 0 < residency.held_tokens(ONE) < WHOLE


def test_a_node_without_prefix_cache_holds_nothing() -> None:
    residency = Residency(0)
    residency.served(ONE)
    assert residency.held_tokens(ONE) == 0
