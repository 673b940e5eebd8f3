"""The double is honest: what goes wrong with real engines goes wrong with it, silently."""

from typing import Any

import pytest

from tests.engine_double.engine import Engine, Fabric, RefusedError, reference_answer

COLD = {"do_remote_decode": True, "do_remote_prefill": False}
HISTORY = list(range(100, 260))
OTHER = [*range(100, 150), 7, *range(151, 300)]


def pair(**settings: Any) -> tuple[Engine, Engine, Fabric]:
    fabric = Fabric()
    return Engine(fabric, **settings), Engine(fabric, **settings), fabric


def turn(p: Engine, d: Engine, ids: list[int], reference: Any = None) -> Any:
    """Both legs; D's answer."""
    prefilled = p.serve(ids, 1, {**(reference or {}), **COLD})
    return d.serve(ids, 20, prefilled.params)


def cut(reference: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    blocks = [reference["remote_block_ids"][0][: num_tokens // 16]]
    return {**reference, "remote_block_ids": blocks, "remote_num_tokens": num_tokens}


def test_a_right_attach_gives_the_right_answer() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    assert first.output == reference_answer(HISTORY, 20)
    longer = [*HISTORY, *first.output, *range(40)]
    second = turn(p, d, longer, cut(first.params, 176))
    assert second.output == reference_answer(longer, 20)


def test_an_edited_history_attached_is_answered_wrongly() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    assert turn(p, d, OTHER, first.params).output != reference_answer(OTHER, 20)


def test_a_shorter_prompt_untrimmed_is_shifted_and_wrong() -> None:
    p, d, _ = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    shorter = HISTORY[:100]
    assert turn(p, d, shorter, first.params).output != reference_answer(shorter, 20)


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
    for start in range(6):
        turn(p, d, [start + 1, *range(300, 500)])
        for pinned in list(d.memory.pins):
            d.memory.unpin(pinned)
    again = turn(p, d, longer, reference)
    assert d.late_notices == 1
    assert again.output != reference_answer(longer, 20)


def test_an_expired_reference_is_refused_and_its_pin_is_gone_by_itself() -> None:
    p, d, fabric = pair(prefix_caching=False)
    first = turn(p, d, HISTORY)
    fabric.now_s += 476
    with pytest.raises(RefusedError):
        p.serve([*HISTORY, *first.output], 1, {**first.params, **COLD})
    assert d.pinned_blocks > 0
    fabric.now_s += 5
    assert d.pinned_blocks == 0


def test_too_few_blocks_kill_the_engine() -> None:
    p, d, _ = pair(prefix_caching=False)
    reference = turn(p, d, HISTORY).params
    reference["remote_block_ids"] = [reference["remote_block_ids"][0][:3]]
    with pytest.raises(RefusedError):
        p.serve([*HISTORY, *range(50)], 1, {**reference, **COLD})
    assert p.dead


def test_references_of_a_restarted_engine_are_refused() -> None:
    p, d, _ = pair(prefix_caching=False)
    reference = turn(p, d, HISTORY).params
    d.restart()
    with pytest.raises(RefusedError):
        p.serve([*HISTORY, *range(50)], 1, {**reference, **COLD})
