"""The ledger: found by the longest boundary, proven, claimed once, bounded, never past its end."""

import pytest

from kvloop.ledger.memory import MAX_AT_ONE_BOUNDARY, Ledger
from tests.builders import FINGERPRINTER, reference

NOW = 10.0
TOKENS = list(range(64))
PREFIXES = FINGERPRINTER.prefixes(TOKENS)


def ledger_with(*references, max_entries: int = 100) -> Ledger:  # type: ignore[no-untyped-def]
    ledger = Ledger(max_entries)
    for one in references:
        ledger.file(one)
    return ledger


def found_ids(ledger: Ledger, *boundaries: bytes, conversation: str | None = None) -> list[int]:
    found = ledger.find(boundaries, PREFIXES, NOW, conversation)
    return [candidate.reference.reference_id for candidate in found.candidates]


def test_the_longest_boundary_decides() -> None:
    ledger = ledger_with(
        reference(1, TOKENS, boundaries=(b"a",)), reference(2, TOKENS, boundaries=(b"a", b"ab"))
    )
    assert found_ids(ledger, b"a", b"ab", b"abc") == [2]


def test_a_branch_finds_the_reference_at_an_earlier_boundary() -> None:
    ledger = ledger_with(reference(1, TOKENS, boundaries=(b"a", b"ab", b"abc")))
    assert found_ids(ledger, b"a", b"ax") == [1]


def test_the_candidate_with_most_proven_tokens_comes_first() -> None:
    other = [*TOKENS[:32], *range(1000, 1032)]
    found = ledger_with(reference(1, other), reference(2, TOKENS), reference(3, other[:48])).find(
        [b"boundary"], PREFIXES, NOW
    )
    assert [(c.reference.reference_id, c.common_tokens) for c in found.candidates] == [
        (2, 64),
        (1, 32),
        (3, 32),
    ]


def test_k07_a_reference_is_claimed_once() -> None:
    ledger = ledger_with(reference(1, TOKENS))
    assert ledger.claim(1, NOW) is not None
    assert ledger.claim(1, NOW) is None
    assert found_ids(ledger, b"boundary") == []


def test_a_claimed_conversation_is_still_known_to_live_on_its_decode_node() -> None:
    ledger = ledger_with(reference(1, TOKENS, decode="http://d7"))
    ledger.claim(1, NOW)
    assert ledger.find([b"boundary"], PREFIXES, NOW).home == "http://d7"


def test_k05_a_reference_past_its_deadline_is_neither_found_nor_claimed() -> None:
    ledger = ledger_with(reference(1, TOKENS, deadline_s=50.0))
    assert ledger.find([b"boundary"], PREFIXES, 50.0).candidates == ()
    assert ledger.claim(1, 50.0) is None


def test_a_deadline_that_passes_between_find_and_claim_counts() -> None:
    ledger = ledger_with(reference(1, TOKENS, deadline_s=50.0))
    assert found_ids(ledger, b"boundary") == [1]
    assert ledger.claim(1, 50.0) is None


def test_filing_hands_superseded_references_back_for_release() -> None:
    ledger = ledger_with(reference(1, TOKENS))
    released = ledger.file(reference(2, TOKENS, boundaries=(b"next",)), supersedes=[1])
    assert [claimed.reference.reference_id for claimed in released] == [1]
    assert found_ids(ledger, b"boundary") == []
    assert len(ledger) == 1


def test_a_claimed_reference_that_is_superseded_is_not_released_again() -> None:
    ledger = ledger_with(reference(1, TOKENS))
    ledger.claim(1, NOW)
    assert ledger.file(reference(2, TOKENS, boundaries=(b"next",)), supersedes=[1]) == []


def test_k12_what_is_least_likely_to_return_is_given_up_first() -> None:
    ledger = ledger_with(
        reference(1, TOKENS, boundaries=(b"1",), continued=True),
        reference(2, TOKENS, boundaries=(b"2",)),
        reference(3, TOKENS, boundaries=(b"3",)),
        reference(4, TOKENS, boundaries=(b"4",), decode="http://d2"),
    )
    assert [one.reference_id for one in ledger.evict("http://d", 65)] == [2, 3]
    assert [one.reference_id for one in ledger.evict("http://d", 1)] == [1]
    assert ledger.evict("http://d", 1) == []
    assert [found_ids(ledger, key) for key in (b"1", b"2", b"3", b"4")] == [[], [], [], [4]]


def test_what_was_given_up_leaves_the_conversations_home() -> None:
    ledger = ledger_with(reference(1, TOKENS))
    ledger.evict("http://d", 1)
    assert ledger.find([b"boundary"], PREFIXES, NOW).home == "http://d"


def test_a_ledger_is_bounded_in_bytes() -> None:
    size = reference(1, TOKENS).num_bytes
    ledger = Ledger(100, max_bytes=2 * size)
    released = [
        claimed.reference_id
        for number in range(1, 5)
        for claimed in ledger.file(reference(number, TOKENS, boundaries=(b"%d" % number,)))
    ]
    assert released == [1, 2]
    assert ledger.num_bytes == 2 * size
    ledger.claim(3, NOW)
    assert ledger.num_bytes == size
    ledger.drain()
    assert ledger.num_bytes == 0


def test_a_full_ledger_hands_its_oldest_back_for_release() -> None:
    ledger = ledger_with(
        reference(1, TOKENS, boundaries=(b"1",)),
        reference(2, TOKENS, boundaries=(b"2",)),
        max_entries=2,
    )
    released = ledger.file(reference(3, TOKENS, boundaries=(b"3",)))
    assert [claimed.reference.reference_id for claimed in released] == [1]
    assert [found_ids(ledger, key) for key in (b"1", b"2", b"3")] == [[], [2], [3]]


def test_k09_references_of_a_restarted_engine_die() -> None:
    ledger = ledger_with(
        reference(1, TOKENS, boundaries=(b"1",), decode="http://d1", engine_id="old"),
        reference(2, TOKENS, boundaries=(b"2",), decode="http://d2", engine_id="old"),
        reference(3, TOKENS, boundaries=(b"3",), decode="http://d1", engine_id="new"),
    )
    assert len(ledger.drop_engine("http://d1", keep_engine_id="new")) == 1
    assert [found_ids(ledger, key) for key in (b"1", b"2", b"3")] == [[], [2], [3]]


def test_k25_data_parallel_ranks_of_one_engine_live_together() -> None:
    ledger = ledger_with(
        reference(1, TOKENS, boundaries=(b"1",), engine_id="old_dp0"),
        reference(2, TOKENS, boundaries=(b"2",), engine_id="new_dp0"),
        reference(3, TOKENS, boundaries=(b"3",), engine_id="new_dp1"),
    )
    assert len(ledger.drop_engine("http://d", keep_engine_id="new_dp1")) == 1
    assert [found_ids(ledger, key) for key in (b"1", b"2", b"3")] == [[], [2], [3]]


def test_k19_a_conversation_id_narrows_to_its_own_references() -> None:
    ledger = ledger_with(
        reference(1, TOKENS, conversation="one"), reference(2, TOKENS, conversation="two")
    )
    assert found_ids(ledger, b"boundary", conversation="one") == [1]
    assert found_ids(ledger, b"boundary", conversation="three") == []
    assert sorted(found_ids(ledger, b"boundary")) == [1, 2]


def test_thousands_of_equal_prompts_do_not_pile_up_at_one_boundary() -> None:
    ledger = Ledger(10_000)
    for number in range(1, 1001):
        ledger.file(reference(number, TOKENS, boundaries=(b"same", b"own-%d" % number)))
    assert len(found_ids(ledger, b"same")) == MAX_AT_ONE_BOUNDARY
    assert found_ids(ledger, b"same", b"own-3") == [3]
    for number in range(1, 1001):
        ledger.file(reference(5000, TOKENS, boundaries=(b"z",)), supersedes=[number])
    assert found_ids(ledger, b"same") == []


def test_a_ledger_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Ledger(0)
