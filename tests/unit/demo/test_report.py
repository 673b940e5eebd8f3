"""The demo's outcome: the JSON's shape is a promise to programs, the table one to people."""

import json

from rich.console import Console

from kvloop.demo.conversation import opening, tool_result
from kvloop.demo.measure import Leg, TurnResult
from kvloop.demo.report import MovedBytes, add_turn, as_json, new_table, summary

MOVED = MovedBytes(decode_to_prefill=23_040 * 896, prefill_to_decode=7)


def leg(text: str, ttft_s: float, pulled: int) -> Leg:
    return Leg(text, ttft_s, 1050, "pull" if pulled else "recompute", pulled, 1050 - pulled)


def results() -> list[TurnResult]:
    return [
        TurnResult(1, leg("same", 2.0, 0), leg("same", 2.0, 0), 0),
        TurnResult(2, leg("one", 6.0, 0), leg("other", 1.5, 896), 23_040 * 896),
    ]


def test_the_json_has_what_it_promises() -> None:
    figures = json.loads(json.dumps(as_json(results(), MOVED)))
    assert figures["turns"][1] == {
        "turn": 2,
        "prompt_tokens": 1050,
        "pulled_tokens": 896,
        "computed_tokens": 154,
        "ttft_off_s": 6.0,
        "ttft_on_s": 1.5,
        "identical": False,
        "nixl_bytes": 23_040 * 896,
    }
    assert figures["turns"][0]["identical"] is True
    assert figures["ttft_ratio_last_turn"] == 4.0
    assert figures["nixl_bytes"] == MOVED.decode_to_prefill
    assert {"vllm", "nixl", "kvloop"} <= figures["engine"].keys()


def test_the_table_shows_a_different_answer_loudly() -> None:
    table = new_table()
    for result in results():
        add_turn(table, result)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    assert captured.get().count("DIFFERENT") == 1
    assert captured.get().count("identical") == 1
    assert "19.7" in captured.get()


def test_the_summary_reconciles_tokens_and_bytes() -> None:
    text = summary(results(), MOVED)
    assert "896 tokens" in text
    assert "23,040 bytes a token" in text
    assert "4.0 times sooner" in text


def test_two_runs_share_no_text_from_their_first_block_on() -> None:
    one, other = opening("aaaa")[0]["content"], opening("bbbb")[0]["content"]
    common = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    assert common < 64
    assert len({tool_result(turn)[0]["content"] for turn in range(1, 7)}) == 6
