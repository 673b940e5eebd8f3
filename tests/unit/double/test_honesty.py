"""The double is honest: what goes wrong with real engines goes wrong with it, silently."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.double.engine import (
    Engine,
    Fabric,
    LoadFailedError,
    OutOfBlocksError,
    RefusedError,
    Sequence,
    free_blocks,
    pinned_tokens,
    reference_answer,
)

COLD = {"do_remote_decode": True, "do_remote_prefill": False}
HISTORY = list(range(100, 260))
OTHER = [*range(100, 150), 7, *range(151, 300)]


def pair(**settings: Any) -> tuple[Engine, Engine, Fabric]:
    fabric = Fabric()
    return Engine(fabric, **settings), Engine(fabric, **settings), fabric


def turn(p: Engine, d: Engine, ids: list[int], reference: Any = None, max_tokens: int = 20) -> Any:
    """Both legs; D's answer."""
    prefilled = p.serve(ids, 1, {**(reference or {}), **COLD})
    return d.serve(ids, max_tokens, prefilled.params)


def cut(reference: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """A reference trimmed to whole proven blocks, as a router must."""
    blocks = [reference["remote_block_ids"][0][: num_tokens // 16]]
    return {**reference, "remote_block_ids": blocks, "remote_num_tokens": num_tokens}


def release_everything(engine: Engine) -> None:
    for request_id in list(engine.memory.pins):
        engine.memory.unpin(request_id)


# Right answers


def test_a_right_attach_gives_the_right_answer() -> None:
    p, d, fabric = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    assert first.output == reference_answer(HISTORY, 20)
    longer = [*HISTORY, *first.output, *range(40)]
    before = fabric.read_tokens
    second = turn(p, d, longer, cut(first.params, 176))
    assert second.output == reference_answer(longer, 20)
    assert fabric.read_tokens - before == 176 + len(longer)


def test_an_untrimmed_reference_of_the_same_history_is_right_too() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    longer = [*HISTORY, *first.output, *range(40)]
    second = turn(p, d, longer, first.params)
    assert second.output == reference_answer(longer, 20)


def test_blocks_and_tokens_cut_together_to_a_shared_prefix_are_right() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    edited = [*HISTORY[:100], *range(500, 600)]
    assert turn(p, d, edited, cut(first.params, 96)).output == reference_answer(edited, 20)


def test_what_p_has_itself_is_not_read_again() -> None:
    p, d, fabric = pair(prefix_caching=True)
    first = turn(p, d, HISTORY)
    before = fabric.read_tokens
    answer = turn(p, d, [*HISTORY, *first.output, *range(90)], first.params)
    assert answer.output == reference_answer(answer.prompt, 20)
    # D's local hit too; P's hit leaves less than the threshold, so P reads nothing at all.
    assert fabric.read_tokens - before == len(answer.prompt) - 176
    assert d.late_notices == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(20, 120), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=60), st.data()
)
def test_whatever_is_proven_in_whole_blocks_is_right_with_and_without_prefix_caches(
    num_history: int, max_tokens: int, more: list[int], data: st.DataObject
) -> None:
    p, d, _ = pair(prefix_caching=data.draw(st.booleans()), num_blocks=200)
    p.kv_recompute_threshold = 0
    ids = HISTORY[:num_history]
    for _ in range(3):
        first = turn(p, d, ids, max_tokens=max_tokens)
        kept = data.draw(st.integers(1, len(ids) + len(first.output)))
        following = [*[*ids, *first.output][:kept], *more, 5]
        proven = min(kept, first.params["remote_num_tokens"]) // 16 * 16
        reference = cut(first.params, proven) if proven else None
        answer = turn(p, d, following, reference, max_tokens=max_tokens)
        assert answer.output == reference_answer(following, max_tokens)
        release_everything(d)
        ids = following


# Wrong answers


def test_an_edited_history_attached_is_answered_wrongly() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    assert turn(p, d, OTHER, first.params).output != reference_answer(OTHER, 20)


def test_a_shorter_prompt_untrimmed_is_shifted_and_wrong() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    shorter = HISTORY[:100]
    assert turn(p, d, shorter, first.params).output != reference_answer(shorter, 20)


def test_one_exported_block_too_many_shifts_all_and_is_wrong() -> None:
    p, d, _ = pair(prefix_caching=False)
    d.extra_exported_blocks = 1
    first = turn(p, d, HISTORY)
    longer = [*HISTORY, *first.output, *range(40)]
    assert turn(p, d, longer, first.params).output != reference_answer(longer, 20)


def test_a_wrong_attach_poisons_the_prefix_cache_for_an_innocent_request() -> None:
    p, d, _ = pair(prefix_caching=True)
    first = turn(p, d, HISTORY)
    turn(p, d, OTHER, first.params)
    innocent = [*OTHER, *range(5)]
    assert turn(p, d, innocent).output != reference_answer(innocent, 20)


def test_a_second_use_reads_whatever_lies_there_by_then() -> None:
    p, d, _ = pair(prefix_caching=False, num_blocks=40)
    first = turn(p, d, HISTORY)
    longer = [*HISTORY, *first.output, *range(40)]
    reference = cut(first.params, 176)
    turn(p, d, longer, reference)
    assert d.late_notices == 0
    for start in range(6):
        turn(p, d, [start + 1, *range(300, 500)])
        release_everything(d)
    again = turn(p, d, longer, reference)
    assert d.late_notices == 1
    assert again.output != reference_answer(longer, 20)


def test_a_second_use_before_anything_was_overwritten_happens_to_be_right_and_is_counted() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    longer = [*HISTORY, *first.output, *range(40)]
    for late in (0, 1):
        pulled = p.serve(longer, 20, {**first.params, **COLD})
        assert pulled.output == reference_answer(longer, 20)
        assert d.late_notices == late


def test_blocks_that_are_not_cached_are_the_first_to_be_taken_again() -> None:
    """vLLM's free_blocks puts them in front: a late reader meets another request's KV at once."""
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    longer = [*HISTORY, *first.output, *range(40)]
    p.serve(longer, 1, {**first.params, **COLD})
    d.serve([7], 1)
    late = p.serve(longer, 20, {**first.params, **COLD})
    assert late.output != reference_answer(longer, 20)


def test_every_position_that_was_read_counts_not_the_last_alone() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    (block, *_), *_ = first.params["remote_block_ids"]
    d.memory.blocks[block].kv[3] += 1
    longer = [*HISTORY, *first.output, *range(40)]
    pulled = p.serve(longer, 20, {**cut(first.params, 160), **COLD})
    assert pulled.output != reference_answer(longer, 20)


def test_engines_that_have_met_do_not_look_at_the_address_again() -> None:
    p, d, _ = pair(prefix_caching=False)
    for port, status in ((9, 500), (None, 200), (9, 200)):
        first = turn(p, d, HISTORY)
        reference = {**first.params, **COLD, "remote_port": port or d.side_port}
        longer = [*HISTORY, *first.output, *range(40)]
        if status == 200:
            assert p.serve(longer, 20, reference).output == reference_answer(longer, 20)
        else:
            with pytest.raises(LoadFailedError):
                p.serve(longer, 20, reference)


def test_a_stale_reference_sent_without_its_expiry_is_read_all_the_same() -> None:
    p, d, fabric = pair(prefix_caching=False, num_blocks=40)
    first = turn(p, d, HISTORY)
    reference = {**cut(first.params, 176), "remote_blocks_expiry_time": None}
    fabric.now_s += 500
    for start in range(6):
        turn(p, d, [start + 1, *range(300, 500)])
        release_everything(d)
    longer = [*HISTORY, *first.output, *range(40)]
    assert turn(p, d, longer, reference).output != reference_answer(longer, 20)
    assert d.late_notices == 1


def test_a_lease_of_p_that_ran_out_before_d_came_is_read_and_counted() -> None:
    p, d, fabric = pair(prefix_caching=False, num_blocks=40)
    prefilled = p.serve(HISTORY, 1, COLD)
    fabric.now_s += 31
    for start in range(4):
        p.serve([start + 1, *range(300, 500)], 1)
    served = d.serve(HISTORY, 20, prefilled.params)
    assert served.output != reference_answer(HISTORY, 20)
    assert (p.late_notices, p.counters.expired_requests) == (1, 1)


def test_adapters_salts_and_media_change_the_answer_and_share_no_cache() -> None:
    _, d, _ = pair(prefix_caching=True)
    plain = d.serve(HISTORY, 20)
    kinds: list[dict[str, Any]] = [{"salt": "s"}, {"adapter": "s"}, {"media": "s"}]
    answers = [plain.output]
    for identity in kinds:
        served = d.serve(HISTORY, 20, **identity)
        assert served.cached_tokens == 0
        assert served.output == reference_answer(HISTORY, 20, **identity)
        answers.append(served.output)
    assert len({tuple(answer) for answer in answers}) == 4


# Pins


def test_a_read_ends_the_pin_and_only_one_turn_stays_pinned() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    assert pinned_tokens(d) == first.params["remote_num_tokens"]
    assert first.params["remote_num_tokens"] == len(HISTORY) + len(first.output) - 1
    longer = [*HISTORY, *first.output, *range(40)]
    second = turn(p, d, longer, first.params)
    assert pinned_tokens(d) == second.params["remote_num_tokens"]
    assert pinned_tokens(p) == 0
    assert free_blocks(p) == p.num_blocks


def test_a_pull_below_the_threshold_is_skipped_and_its_pin_is_freed() -> None:
    p, d, fabric = pair(prefix_caching=False)
    first = turn(p, d, HISTORY[:40])
    before = fabric.read_tokens
    p.serve([*HISTORY[:40], *first.output], 1, {**first.params, **COLD})
    assert fabric.read_tokens == before
    assert pinned_tokens(d) == 0


def test_a_pull_covered_by_the_local_cache_is_skipped_and_its_pin_is_freed() -> None:
    p, d, fabric = pair(prefix_caching=True)
    first = turn(p, d, HISTORY)
    before = fabric.read_tokens
    p.serve(HISTORY, 1, {**cut(first.params, 144), **COLD})
    assert fabric.read_tokens == before
    assert pinned_tokens(d) == 0


def test_an_expired_reference_is_refused_and_its_pin_is_gone_by_itself() -> None:
    p, d, fabric = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    fabric.now_s += 476
    with pytest.raises(LoadFailedError):
        p.serve([*HISTORY, *first.output], 1, {**first.params, **COLD})
    assert d.pinned_blocks > 0
    right = {**first.params, "remote_blocks_expiry_time": None}
    assert p.serve([*HISTORY, *first.output], 1, {**right, **COLD}).params is not None
    turn(p, d, HISTORY)
    fabric.now_s += 481
    assert d.pinned_blocks == 0
    assert d.counters.expired_requests == 1


def test_requests_without_transfer_fields_pin_nothing_and_return_nothing() -> None:
    _, d, _ = pair()
    served = d.serve(HISTORY, 20)
    assert served.params is None
    assert free_blocks(d) == d.num_blocks


def test_transfer_fields_sent_to_d_alone_leak_for_ever() -> None:
    _, d, fabric = pair()
    leaked = d.serve(HISTORY, 20, {"remote_num_tokens": None, "x": 1})
    assert leaked.params is not None
    fabric.now_s += 10_000
    d.notified(leaked.params["remote_request_id"])
    assert pinned_tokens(d) > 0


def test_an_aborted_request_pins_nothing() -> None:
    p, d, _ = pair(prefix_caching=False)
    running = d.begin(HISTORY, 20, p.serve(HISTORY, 1, COLD).params)
    running.step()
    assert free_blocks(d) < d.num_blocks
    running.abort()
    assert (running.params, free_blocks(d)) == (None, d.num_blocks)


def test_pinned_blocks_are_never_taken_and_a_full_memory_refuses_before_it_reads() -> None:
    p, d, fabric = pair(prefix_caching=True, num_blocks=30)
    first = turn(p, d, HISTORY)
    prefilled = p.serve(OTHER, 1, COLD)
    turn(p, d, [3, *HISTORY[:100]])
    with pytest.raises(OutOfBlocksError):
        d.serve(OTHER, 200, prefilled.params)
    assert pinned_tokens(p) == len(OTHER)
    longer = [*HISTORY, *first.output]
    fabric.now_s += 481
    assert d.serve(OTHER, 200).output == reference_answer(OTHER, 200)
    assert len(longer) < 480


def test_running_requests_are_promised_the_blocks_they_may_need() -> None:
    _, d, _ = pair(prefix_caching=False, num_blocks=24)
    running: list[Sequence] = [d.begin(HISTORY[:16], 150)]
    running.append(d.begin(HISTORY[16:32], 150))
    with pytest.raises(OutOfBlocksError):
        d.begin(HISTORY[32:48], 150)
    for sequence in running:
        while not sequence.finish_reason:
            sequence.step()
        assert sequence.output == reference_answer(sequence.prompt, 150)
    assert free_blocks(d) == 24


def test_cached_blocks_are_evicted_least_recently_used_first_from_the_end() -> None:
    _, d, _ = pair(prefix_caching=True, num_blocks=30)
    for start in (1, 2, 3):
        d.serve([start, *HISTORY], 1)
    cached = [d.serve([start, *HISTORY], 1).cached_tokens for start in (3, 2, 1)]
    assert cached == [160, 160, 144]  # they share a block for the last token


# Deaths


def test_too_few_blocks_kill_the_engine() -> None:
    p, d, _ = pair(prefix_caching=False)
    reference = turn(p, d, HISTORY).params
    reference["remote_block_ids"] = [reference["remote_block_ids"][0][:3]]
    with pytest.raises(RefusedError):
        p.serve([*HISTORY, *range(50)], 1, {**reference, **COLD})
    assert p.dead


def test_a_read_without_remote_blocks_kills_the_engine() -> None:
    _, d, _ = pair()
    with pytest.raises(RefusedError):
        d.serve(HISTORY, 20, {"do_remote_prefill": True})
    assert d.dead


@pytest.mark.parametrize("change", ["restart", "death", "port"])
def test_references_of_an_engine_that_is_not_there_are_refused(change: str) -> None:
    p, d, _ = pair(prefix_caching=False)
    reference = turn(p, d, HISTORY).params
    if change == "restart":
        d.restart()
    d.dead = change == "death"
    reference["remote_port"] += change == "port"
    with pytest.raises(LoadFailedError):
        p.serve([*HISTORY, *range(50)], 1, {**reference, **COLD})
    assert free_blocks(p) == p.num_blocks
