"""Rows of the catalogue of known failures that have no better place; named after their numbers.

Where the engine does the bad thing when it is driven wrongly, the test shows that first.
"""

import asyncio
import dataclasses
import re
from pathlib import Path

import pytest

from kvloop.config import Settings
from kvloop.gateway.server import running, wait_until_ready
from tests.double.engine import Engine, Fabric, reference_answer
from tests.double.http import until
from tests.double.tokens import render_chat
from tests.router.stack import follow, opening, stack

CATALOGUE = Path(__file__).parents[2] / "docs" / "known-failures.md"


def test_k02_the_engine_itself_files_wrong_kv_under_the_right_hashes() -> None:
    """The control: this is what one wrong attach does to somebody else."""
    fabric = Fabric()
    p, d = Engine(fabric), Engine(fabric)
    history = [1000 + number for number in range(160)]
    prefilled = p.serve(history, 1, {"do_remote_decode": True})
    assert prefilled.params is not None
    first = d.serve(history, 8, prefilled.params)
    edited = [7, *history[1:], *first.output, *range(40)]
    p.memory.cached.clear()
    wrong = p.serve(edited, 1, {**(first.params or {}), "do_remote_decode": True})
    assert wrong.output != reference_answer(edited, 1)
    assert p.memory.poisoned > 0
    somebody_else = p.serve([*edited, 5, 6], 8)
    assert somebody_else.output != reference_answer([*edited, 5, 6], 8)


async def test_k02_edited_histories_leave_no_wrong_kv_behind() -> None:
    async with stack(prefix_caching=True) as s:
        messages = opening()
        first = await s.chat(messages)
        edited = [messages[0], {"role": "user", "content": "X" + messages[1]["content"][1:]}]
        for text in ("Go on.", "Once more.", "And again."):
            await s.chat(follow(edited, first.text, text))
            await s.chat(follow(messages, first.text, text))
        assert s.prefill.memory.poisoned == s.decode.memory.poisoned == 0


async def test_k15_a_d_that_takes_a_stream_too_late_is_given_up_before_p_frees_its_blocks() -> None:
    async with stack(settings={"kv_lease_s": 6.0}) as s:
        s.decode.hold = asyncio.Event()
        answer = await s.chat(opening(), right=False)
        assert answer.status == 504
        s.decode.hold.set()
        await until(lambda: s.prefill.pinned_blocks == 0)
        assert s.fabric.handovers == []  # D never read what P was about to free


@pytest.mark.parametrize("host", ["10.1.2.3", "fd00::7"])
async def test_k24_host_and_port_of_the_side_channel_go_on_as_the_engine_gave_them(
    host: str,
) -> None:
    async with stack() as s:
        s.decode.side_host, s.decode.side_port = host, 6123
        messages = opening()
        first = await s.chat(messages)
        assert (await s.chat(follow(messages, first.text))).route == "pull"
        params = s.prefill.requests[-1].body["kv_transfer_params"]
        assert (params["remote_host"], params["remote_port"]) == (host, 6123)


async def test_k27_what_gains_too_few_tokens_over_p_s_own_cache_is_not_pulled() -> None:
    async with stack(prefix_caching=True, settings={"threshold_tokens": 96}) as s:
        messages = opening()
        first = await s.chat(messages, max_tokens=20)
        answer = await s.chat(follow(messages, first.text))
        # Nearly all that D holds, P has computed itself a moment ago.
        assert "below_threshold" in answer.headers["x-kvloop-route"]


async def test_k28_a_second_router_and_a_restarted_one_are_cold_and_right() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        settings = Settings(
            prefill=s.router.settings.prefill,
            decode=s.router.settings.decode,
            port=0,
            admin_port=0,
            check_releases=False,
        )
        async with running(settings) as url:
            await wait_until_ready(url, timeout_s=10)
            second = dataclasses.replace(s, url=url)
            answer = await second.chat(follow(messages, first.text))
            assert answer.route == "recompute"
            after = await second.chat(follow(messages, first.text, "Something else."))
            assert after.status == 200


def test_every_row_of_the_catalogue_has_its_tests_or_says_why_not() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", CATALOGUE.read_text("utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 31))
    written = "\n".join(
        path.read_text("utf-8")
        for path in CATALOGUE.parents[1].joinpath("tests").rglob("test_*.py")
    )
    for number, said in rows:
        names = re.findall(r"`(test_\w+)`", said)
        assert names or said.startswith("not "), f"row {number} has neither test nor reason"
        for name in names:
            assert f"def {name}(" in written, f"row {number}: there is no {name}"


async def test_render_is_what_the_engine_computes() -> None:
    """The proof stands on it (row 22): the ids that are proven are those that are sent."""
    async with stack() as s:
        messages = opening()
        await s.chat(messages)
        sent = s.prefill.requests[-1].body["kv_transfer_params"]["prompt_token_ids"]
        assert sent == render_chat(messages)
