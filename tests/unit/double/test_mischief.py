"""The knobs: what goes wrong with engines goes wrong with the double when told to."""

import asyncio
import json
from functools import partial

import aiohttp
import pytest

from tests.double.engine import Engine, free_blocks, pinned_tokens, reference_answer
from tests.double.http import kill, revive, until
from tests.double.tokens import decode, render_chat
from tests.unit.double.client import CHAT, COMPLETIONS, IDS, MESSAGES, doubles

BODY = {"messages": MESSAGES, "max_tokens": 20}


def _has_lost(engine: Engine, clients: int) -> bool:
    return engine.disconnects == clients


def _is_leased_until(engine: Engine, end_s: float) -> bool:
    return all(pin.ends_s >= end_s for pin in engine.memory.pins.values())


async def test_an_unknown_model_with_a_reference_releases_it_without_a_read() -> None:
    async with doubles() as s:
        given = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        body = {"prompt": IDS, "max_tokens": 5, "kv_transfer_params": given}
        _, answer = await s.post(s.d_url + COMPLETIONS, body)
        assert pinned_tokens(s.d) > 0
        release = {**answer["kv_transfer_params"], "do_remote_prefill": True}
        body = {"model": "nobody", "prompt": [1], "kv_transfer_params": release}
        status, refused = await s.post(s.p_url + COMPLETIONS, body)
        assert (status, refused["error"]["type"], refused["error"]["code"]) == (
            404,
            "NotFoundError",
            404,
        )
        assert pinned_tokens(s.d) == s.d.late_notices == 0
        assert s.p.counters.transfers == 0


async def test_a_release_without_its_fields_kills_the_engine() -> None:
    async with doubles() as s:
        body = {"model": "nobody", "prompt": [1], "kv_transfer_params": {"do_remote_prefill": True}}
        assert (await s.post(s.p_url + COMPLETIONS, body))[0] == 404
        assert s.p.dead


async def test_transfer_fields_that_are_a_string_kill_the_engine_behind_its_back_only() -> None:
    async with doubles() as s:
        wrong = {"kv_transfer_params": "x"}
        assert (await s.post(s.p_url + CHAT, {**BODY, **wrong}))[0] == 400
        assert not s.p.dead
        assert (await s.post(s.p_url + CHAT, {**BODY, "vllm_xargs": wrong}))[0] == 500
        with pytest.raises(aiohttp.ClientConnectionError):
            await s.post(s.p_url + CHAT, BODY)


async def test_a_failed_load_is_a_500_and_in_a_stream_an_error_event_after_a_200() -> None:
    async with doubles() as s:
        given = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        body = {"prompt": IDS, "max_tokens": 5, "kv_transfer_params": given}
        s.p.restart()
        status, answer = await s.post(s.d_url + COMPLETIONS, body)
        error = {"message": "Internal server error", "type": "InternalServerError"}
        assert status == 500
        assert answer == {"error": {**error, "param": None, "code": 500}}
        assert await s.events(s.d_url + COMPLETIONS, body) == [answer]
        assert free_blocks(s.d) == s.d.num_blocks


async def test_recomputing_after_a_failed_load_is_right_on_d_and_waits_for_ever_on_p() -> None:
    async with doubles(prefix_caching=False) as s:
        s.p.kv_load_failure_policy = s.d.kv_load_failure_policy = "recompute"
        given = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        s.p.restart()
        body = {"prompt": IDS, "max_tokens": 5, "kv_transfer_params": given}
        _, answer = await s.post(s.d_url + COMPLETIONS, body)
        assert answer["choices"][0]["text"] == decode(reference_answer(IDS, 5))
        s.d.restart()
        pull = asyncio.create_task(s.prefill({"prompt": IDS}, answer["kv_transfer_params"]))
        await until(lambda: s.p.num_waiting == 1)
        pull.cancel()
        await until(lambda: s.p.num_waiting == 0)


async def test_requests_are_refused_broken_off_or_held_as_often_as_told() -> None:
    async with doubles() as s:
        s.d.refuse_next = [503, 429]
        s.d.break_next = 1
        with pytest.raises(aiohttp.ClientConnectionError):
            await s.post(s.d_url + CHAT, BODY)
        assert [(await s.post(s.d_url + CHAT, BODY))[0] for _ in range(3)] == [503, 429, 200]
        s.d.hold = asyncio.Event()
        held = asyncio.create_task(s.post(s.d_url + CHAT, BODY))
        await until(lambda: len(s.d.requests) == 5)
        assert not held.done()
        s.d.hold.set()
        assert (await held)[0] == 200


async def test_a_stream_can_die_after_so_many_events() -> None:
    async with doubles() as s:
        s.d.break_stream_after = 4
        with pytest.raises(aiohttp.ClientPayloadError):
            await s.chunks(s.d_url + CHAT, BODY)
        assert free_blocks(s.d) == s.d.num_blocks


async def test_a_client_that_leaves_aborts_and_nothing_is_pinned() -> None:
    async with doubles(prefix_caching=False) as s:
        for stream in (True, False):
            given = (await s.prefill(BODY))["kv_transfer_params"]
            s.d.token_gate = asyncio.Semaphore(3)
            body = {**BODY, "model": "double", "stream": stream, "kv_transfer_params": given}
            task = asyncio.create_task(s.post(s.d_url + CHAT, body))
            await until(lambda: s.d.running and len(s.d.running[0].output) == 3)
            task.cancel()
            task_number = 1 if stream else 2
            await until(partial(_has_lost, s.d, task_number))
            assert (s.d.running, free_blocks(s.d)) == ([], s.d.num_blocks)
        assert pinned_tokens(s.p) == 0


@pytest.mark.parametrize(("merged", "size"), [(3, 10_000), (2, 7), (1000, 100)])
async def test_events_can_be_split_and_merged_across_http_chunks(merged: int, size: int) -> None:
    async with doubles() as s:
        whole = b"".join(await s.chunks(s.d_url + CHAT, BODY))
        s.d.merge_events = merged
        s.d.cut_stream = lambda data: [data[i : i + size] for i in range(0, len(data), size)]
        chunks = await s.chunks(s.d_url + CHAT, BODY)
        assert b"".join(chunks) == whole
        assert max(map(len, chunks)) <= size
        assert any(chunk.count(b"data: ") != 1 for chunk in chunks)


async def test_a_pull_at_an_engine_without_the_bidirectional_option_waits_for_ever() -> None:
    async with doubles(prefix_caching=False) as s:
        given = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        body = {"prompt": IDS, "max_tokens": 5, "kv_transfer_params": given}
        _, answer = await s.post(s.d_url + COMPLETIONS, body)
        s.p.bidirectional = False
        pull = asyncio.create_task(s.prefill({"prompt": IDS}, answer["kv_transfer_params"]))
        await until(lambda: s.p.num_waiting == 1)
        s.fabric.now_s += 400
        await asyncio.sleep(0)
        assert not pull.done()
        pull.cancel()
        await until(lambda: s.p.disconnects == 1)
        assert pinned_tokens(s.d) > 0


async def test_a_request_waits_while_pins_fill_the_memory_and_goes_on_when_they_end() -> None:
    async with doubles(prefix_caching=False, num_blocks=20) as s:
        given = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        body = {"prompt": IDS, "max_tokens": 5, "kv_transfer_params": given}
        assert (await s.post(s.d_url + COMPLETIONS, body))[0] == 200
        given = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        body["kv_transfer_params"] = given
        s.d.memory_timeout_s = 0.01
        assert (await s.post(s.d_url + COMPLETIONS, body))[0] == 503
        assert pinned_tokens(s.p) == 0  # a rejected request's blocks are given back
        s.d.memory_timeout_s = None
        body["kv_transfer_params"] = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        waiting = asyncio.create_task(s.post(s.d_url + COMPLETIONS, body))
        await until(lambda: s.d.num_waiting == 1)
        for _ in range(24):  # P's lease is 30 s, D's pin 480 s: heartbeats bridge that
            s.fabric.now_s += 20
            await until(partial(_is_leased_until, s.p, s.p.now_s + 30))
        status, answer = await waiting
        assert status == 200
        assert answer["choices"][0]["text"] == decode(reference_answer(IDS, 5))
        assert s.p.late_notices == 0


async def test_a_killed_engine_refuses_connections_until_another_process_takes_its_place() -> None:
    async with doubles() as s:
        engine_id = s.d.engine_id
        s.d.token_gate = asyncio.Semaphore(0)
        broken = asyncio.create_task(s.chunks(s.d_url + CHAT, BODY))
        await until(lambda: s.d.running)
        await kill(s.d)
        with pytest.raises(aiohttp.ClientError):
            await broken
        with pytest.raises(aiohttp.ClientConnectorError):
            await s.post(s.d_url + CHAT, BODY)
        await revive(s.d)
        s.d.token_gate = None
        assert (await s.post(s.d_url + CHAT, BODY))[0] == 200
        assert s.d.engine_id != engine_id
        assert s.d.started_s == 2.0


async def test_a_slow_stream_gives_a_token_for_each_permit() -> None:
    async with doubles() as s:
        s.d.token_gate = asyncio.Semaphore(0)
        asked = {**BODY, "model": "double", "stream": True}
        async with s.http.post(s.d_url + CHAT, json=asked) as response:
            wanted = reference_answer(render_chat(MESSAGES), 20)
            for number, token in enumerate(wanted):
                s.d.token_gate.release()
                if number == 0:
                    await response.content.readuntil(b"\n\n")
                event = json.loads((await response.content.readuntil(b"\n\n"))[6:])
                assert event["choices"][0]["delta"]["content"] == decode([token])
            assert await response.content.read() == b"data: [DONE]\n\n"


async def test_an_engine_can_render_otherwise_than_it_computes_and_ignore_our_ids() -> None:
    async with doubles() as s:
        s.p.renders_differently = s.p.ignores_ids = True
        _, rendered = await s.post(s.p_url + CHAT + "/render", {"messages": MESSAGES})
        params = {"kv_transfer_params": {"prompt_token_ids": rendered["token_ids"]}}
        body = {**BODY, "return_token_ids": True, **params}
        _, answer = await s.post(s.p_url + CHAT, body)
        assert rendered["token_ids"] == render_chat(MESSAGES)
        assert answer["prompt_token_ids"] == render_chat(MESSAGES, stamped=True)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "Bad Request"),
        ({"messages": []}, "BadRequestError"),
        ({"messages": ["x"]}, "Bad Request"),
        ({"messages": MESSAGES, "max_tokens": 200_000}, "BadRequestError"),
        ({"messages": MESSAGES, "kv_transfer_params": []}, "Bad Request"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "BadRequestError"),
        ({"messages": MESSAGES, "n": 2, "temperature": 0}, "BadRequestError"),
    ],
)
async def test_bad_requests_are_refused_in_vllms_shape(body: dict[str, object], kind: str) -> None:
    async with doubles() as s:
        status, answer = await s.post(s.d_url + CHAT, body)
        assert status == answer["error"]["code"] == 400
        assert answer["error"]["type"] == kind
        assert set(answer["error"]) == {"message", "type", "param", "code"}
