"""The loop against the double: right answers always, and as much reuse as is proven."""

from typing import Any

import pytest

from tests.double.engine import reference_answer
from tests.double.http import until
from tests.double.tokens import decode, render_chat
from tests.router.stack import follow, opening, stack


async def test_the_history_is_pulled_on_every_turn_after_the_first() -> None:
    async with stack() as s:
        messages = opening()
        answer = await s.chat(messages)
        assert answer.route == "recompute"
        for _ in range(4):
            held = len(render_chat(messages)) + 24 - 1
            messages = follow(messages, answer.text)
            answer = await s.chat(messages)
            assert answer.route == "pull"
            assert held - 40 < answer.pulled <= held
        assert s.decode.late_notices == s.prefill.late_notices == 0


async def test_whole_answers_are_reused_like_streamed_ones() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages, stream=False)
        assert b"token_ids" not in first.body
        answer = await s.chat(follow(messages, first.text), stream=False)
        assert answer.route == "pull"


async def test_completions_find_their_history_by_tokens() -> None:
    async with stack() as s:
        prompt = "The river flows through many countries. " * 8
        first = await s.completion(prompt)
        second = await s.completion(prompt + first.text + " And then")
        assert second.route == "pull"
        third = await s.completion([ord(c) for c in prompt + first.text + " And then, so"])
        assert third.status == 200


async def test_reuse_off_is_plain_p_and_d_and_pins_nothing() -> None:
    async with stack() as s:
        messages, off = opening(), {"x-kvloop-reuse": "off"}
        first = await s.chat(messages, headers=off)
        second = await s.chat(follow(messages, first.text), headers=off)
        assert (first.route, second.route) == ("recompute", "recompute")
        await until(lambda: s.decode.pinned_blocks == 0)


async def test_k01_a_history_edited_in_the_middle_is_reused_up_to_the_edit() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        messages = follow(messages, first.text, "Then tell me more, and at length. " * 6)
        second = await s.chat(messages)
        edited = [*messages]
        edited[3] = {"role": "user", "content": messages[3]["content"][:100] + "Something else."}
        answer = await s.chat(follow(edited, second.text))
        assert answer.route == "pull"
        shared = len(render_chat(messages[:3])) + 40
        assert shared < answer.pulled < len(render_chat(messages))


async def test_k01_a_first_message_that_was_edited_is_not_reused() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        edited = [messages[0], {"role": "user", "content": "X" + messages[1]["content"][1:]}]
        assert (await s.chat(follow(edited, first.text))).route == "recompute"


async def test_k01_reasoning_stripped_by_the_template_is_not_attached() -> None:
    async with stack() as s:
        s.prefill.strips_reasoning = s.decode.strips_reasoning = True
        messages = opening()
        await s.chat(messages)
        # The client sends the answer back with thoughts that the template drops.
        messages = follow(messages, "<think>hm</think>Well, rivers are long.")
        answer = await s.chat(messages)
        assert answer.route == "pull"
        assert answer.pulled <= len(render_chat(opening()))


async def test_k03_a_branch_at_an_earlier_message_and_a_shorter_prompt_are_right() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        longer = follow(messages, first.text, "And now a long question about it. " * 5)
        await s.chat(longer)
        regenerated = await s.chat(messages)
        assert regenerated.route == "pull"
        branch = await s.chat(follow(messages, first.text, "Another question."))
        assert branch.text


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"authorization": "Bearer somebody-else"}, {}),
        ({}, {"cache_salt": "other"}),
        ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ({"x-session-id": "another"}, {}),
    ],
)
async def test_k21_other_tenants_salts_tools_and_sessions_share_nothing(
    headers: dict[str, str], fields: dict[str, Any]
) -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages, headers={"x-session-id": "one"})
        given = {"x-session-id": "one", **headers}
        other = await s.chat(follow(messages, first.text), headers=given, **fields)
        assert other.route == "recompute"
        mine = await s.chat(follow(messages, first.text), headers={"x-session-id": "one"})
        assert mine.route == "pull"


async def test_k07_a_retry_of_the_same_turn_does_not_use_the_reference_again() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        again = follow(messages, first.text)
        assert (await s.chat(again)).route == "pull"
        await s.chat(again)
        assert s.decode.late_notices == 0


async def test_k05_an_expired_reference_is_not_used() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        s.fabric.now_s += 470.0
        answer = await s.chat(follow(messages, first.text))
        assert answer.route == "recompute"
        assert len(s.prefill.requests) == 2


async def test_k06_a_refused_pull_is_computed_instead_once() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        s.prefill.refuse_next = [500]
        answer = await s.chat(follow(messages, first.text))
        assert answer.route == "recompute"
        assert "pull_refused" in answer.headers["x-kvloop-route"]
        attached = [
            bool(b["kv_transfer_params"].get("remote_block_ids"))
            for _, b, _ in s.prefill.requests
            if b["model"] == "double"
        ]
        assert attached == [False, True, False]
        await until(lambda: len(s.decode.memory.pins) == 1)  # the refused one was given back


async def test_k09_references_of_a_restarted_decode_node_die() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        s.decode.restart()
        answer = await s.chat(follow(messages, first.text))
        assert answer.status == 200
        await s.chat(follow(messages, answer.text))


async def test_k22_an_engine_that_ignores_our_ids_gets_nothing_filed() -> None:
    async with stack() as s:
        s.prefill.ignores_ids = s.decode.ignores_ids = True
        s.prefill.renders_differently = True
        first = await s.chat(opening(), right=False)
        assert first.status == 200
        assert len(s.router.services.ledger) == 0


async def test_k12_a_superseded_reference_is_given_back() -> None:
    async with stack(settings={"threshold_tokens": 100_000}) as s:
        messages = opening()
        for _ in range(3):
            answer = await s.chat(messages)
            messages = follow(messages, answer.text)
        await until(lambda: len(s.decode.memory.pins) == 1)


async def test_k17_several_sequences_go_to_d_alone_and_pin_nothing() -> None:
    async with stack() as s:
        answer = await s.chat(opening(), n=2, right=False)
        assert answer.route == "append"
        assert s.prefill.requests == []
        assert s.decode.requests[0][1].get("kv_transfer_params") is None
        assert s.decode.pinned_blocks == 0


async def test_k19_clients_cannot_reach_the_transfer_fields() -> None:
    async with stack() as s:
        attack = {"do_remote_prefill": True, "remote_block_ids": None}
        await s.chat(opening(), kv_transfer_params=attack)
        await s.chat(opening(), kv_transfer_params="x", vllm_xargs={"kv_transfer_params": "x"})
        assert not s.prefill.dead
        assert not s.decode.dead


async def test_k04_one_exported_block_too_many_changes_nothing() -> None:
    async with stack() as s:
        s.decode.extra_exported_blocks = 1
        messages = opening()
        for _ in range(3):
            answer = await s.chat(messages)
            messages = follow(messages, answer.text)
        assert answer.route == "pull"


async def test_a_stop_string_leaves_nothing_to_reuse() -> None:
    async with stack() as s:
        messages = opening()
        wanted = decode(reference_answer(render_chat(messages), 24))
        answer = await s.chat(messages, stop=[wanted[3]], right=False)
        assert answer.text == wanted[:3].partition(wanted[3])[0]
        assert (await s.chat(follow(messages, answer.text))).route == "recompute"


async def test_k23_without_the_plugin_streams_work_and_ready_and_the_log_say_what_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stack(plugin=False) as s:
        messages = opening()
        first = await s.chat(messages)
        assert (await s.chat(follow(messages, first.text))).route == "recompute"
        async with s.http.get(f"{s.admin_url}/ready") as response:
            state = await response.json()
        assert state["ready"] is True
        assert caplog.text.count("does not stream KV references") == 1
        assert "does not stream KV references" in state["warnings"][0]


async def test_native_references_of_later_engines_are_used_and_hidden() -> None:
    async with stack(plugin=False) as s:
        s.decode.native_stream_reference = True
        messages = opening()
        first = await s.chat(messages)
        answer = await s.chat(follow(messages, first.text))
        assert answer.route == "pull"
        assert answer.pulled <= len(render_chat(messages))


async def test_k23_without_a_renderer_nothing_is_attached() -> None:
    async with stack() as s:
        for engine in (s.prefill, s.decode):
            engine.renders = False
            engine.started_s += 1
        await until(lambda: not any(e.facts.renders for e in s.router.services.fleet.prefills))
        messages = opening()
        first = await s.chat(messages)
        assert (await s.chat(follow(messages, first.text))).route == "recompute"
        async with s.http.get(f"{s.admin_url}/ready") as response:
            assert "no engine renders" in str(await response.json())


async def test_the_wrong_attach_is_seen_by_this_suite() -> None:
    """The same history, edited, attached untrimmed: the double answers wrongly with 200."""
    async with stack() as s:
        messages = opening()
        await s.chat(messages)
        (found,) = s.router.services.ledger.drain()
        edited = [*opening("Tell me about rivers?"), {"role": "user", "content": "Go on. " * 20}]
        ids = render_chat(edited)
        prefilled = s.prefill.serve(
            ids, 1, {**found.params, "do_remote_decode": True, "do_remote_prefill": False}
        )
        served = s.decode.serve(ids, 24, prefilled.params)
        assert served.output != reference_answer(ids, 24)
