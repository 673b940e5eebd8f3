"""Fingerprints: equal up to where the tokens are equal, and not one unit further."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.proof.fingerprint import UNIT_TOKENS, Fingerprinter, common_tokens
from tests.builders import FINGERPRINTER

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(shared=tokens, ours=tokens, theirs=tokens)
def test_common_tokens_is_the_common_prefix_in_whole_units(
    shared: list[int], ours: list[int], theirs: list[int]
) -> None:
    left, right = shared + ours, shared + theirs
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    found = common_tokens(FINGERPRINTER.prefixes(left), FINGERPRINTER.prefixes(right))
    assert found == length // UNIT_TOKENS * UNIT_TOKENS


@given(token_ids=st.lists(st.integers(0, 50_000), min_size=16, max_size=400), data=st.data())
def test_one_changed_token_is_always_seen(token_ids: list[int], data: st.DataObject) -> None:
    whole = len(token_ids) // UNIT_TOKENS * UNIT_TOKENS
    position = data.draw(st.integers(0, whole - 1))
    changed = list(token_ids)
    changed[position] = (changed[position] + data.draw(st.integers(1, 50_000))) % 2**32
    found = common_tokens(FINGERPRINTER.prefixes(token_ids), FINGERPRINTER.prefixes(changed))
    assert found == position // UNIT_TOKENS * UNIT_TOKENS


def test_swapped_tokens_and_swapped_units_are_seen() -> None:
    token_ids = list(range(64))
    swapped = [*token_ids[16:32], *token_ids[:16], *token_ids[32:]]
    assert common_tokens(FINGERPRINTER.prefixes(token_ids), FINGERPRINTER.prefixes(swapped)) == 0


def test_a_prompt_longer_than_all_before_leaves_earlier_fingerprints_valid() -> None:
    fingerprinter = Fingerprinter(b"another secret of tests")
    short = fingerprinter.prefixes(list(range(1000)))
    long = fingerprinter.prefixes(list(range(50_000)))
    assert common_tokens(short, long) == 1000 // UNIT_TOKENS * UNIT_TOKENS
    assert common_tokens(fingerprinter.prefixes(list(range(1000))), short) == 992


def test_another_secret_gives_other_fingerprints() -> None:
    other = Fingerprinter(b"another secret of tests").prefixes(list(range(64)))
    assert common_tokens(FINGERPRINTER.prefixes(list(range(64))), other) == 0


def test_a_guessable_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Fingerprinter(b"short")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        FINGERPRINTER.prefixes([token] * 16)
