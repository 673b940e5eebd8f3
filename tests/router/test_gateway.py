"""The HTTP surface: what clients and operators see."""

import asyncio
import json

import pytest

from tests.double.http import until
from tests.router.stack import follow, opening, stack

CHAT = "/v1/chat/completions"


async def test_d_events_reach_the_client_byte_for_byte() -> None:
    async with stack() as s:
        body = {"model": "double", "messages": opening(), "max_tokens": 9, "stream": True}
        body["stream_options"] = {"include_usage": True}
        through = await s.post(CHAT, body)
        async with s.http.post(s.router.services.fleet.decodes[0].url + CHAT, json=body) as direct:
            assert through.body == await direct.read()
        assert b'"usage"' in through.body
        assert through.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_k18_however_d_cuts_its_stream_it_comes_out_whole(size: int) -> None:
    async with stack() as s:
        s.decode.cut_stream = lambda data: [data[i : i + size] for i in range(0, len(data), size)]
        messages = opening()
        first = await s.chat(messages)
        assert (await s.chat(follow(messages, first.text))).route == "pull"


async def test_every_field_reaches_both_legs_but_what_they_own() -> None:
    async with stack() as s:
        await s.chat(opening(), seed=3, user="u", vendor={"x": [1]}, temperature=0.0)
        for engine in (s.prefill, s.decode):
            _, body, headers = engine.requests[0]
            assert (body["seed"], body["user"], body["vendor"]) == (3, "u", {"x": [1]})
            assert headers["x-request-id"]
        assert s.prefill.requests[0][1]["max_tokens"] == 1
        assert s.decode.requests[0][1]["max_tokens"] == 24


async def test_request_ids_are_the_clients_or_new() -> None:
    async with stack() as s:
        own = await s.chat(opening(), headers={"x-request-id": "mine-1"})
        assert own.headers["x-request-id"] == "mine-1"
        new = await s.chat(opening(), headers={"x-request-id": "not a valid id {}"})
        assert len(new.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, b"", 400),
        (CHAT, b"[]", 400),
        (CHAT, b'{"messages": []}', 400),
        (CHAT, b'{"messages": [1]}', 400),
        ("/v1/completions", b"{}", 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
        (CHAT, b"x" * 2_000_000, 413),
    ],
)
async def test_bad_input_gets_an_error_in_the_apis_shape(
    path: str, data: bytes, status: int
) -> None:
    async with stack(settings={"max_body_bytes": 1_000_000}) as s:
        answer = await s.post(path, data)
        assert answer.status == status
        error = json.loads(answer.body)["error"]
        assert error["code"] == status
        assert error["message"]
        assert error["type"]


async def test_a_wrong_reuse_wish_is_refused() -> None:
    async with stack() as s:
        answer = await s.post(CHAT, {"messages": opening()}, {"x-kvloop-reuse": "maybe"})
        assert answer.status == 400


async def test_an_engines_own_error_reaches_the_client_as_it_is() -> None:
    async with stack() as s:
        answer = await s.post(CHAT, {"model": "nope", "messages": opening()})
        assert answer.status == 404
        assert "nope" in json.loads(answer.body)["error"]["message"]


async def test_models_are_those_of_the_decode_nodes() -> None:
    async with stack() as s, s.http.get(f"{s.url}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["double"]


async def test_ready_and_metrics_tell_operators() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        await s.chat(follow(messages, first.text))
        async with s.http.get(f"{s.url}/health") as response:
            assert response.status == 200
        async with s.http.get(f"{s.admin_url}/metrics") as response:
            text = await response.text()
        assert 'kvloop_turns_total{api="chat",route="pull",why="proven"} 1.0' in text
        pulled = text.split('kvloop_prompt_tokens_total{source="pulled"} ')[1].split("\n")[0]
        assert float(pulled) > 0


async def test_without_a_decode_node_the_router_is_not_ready_and_says_why() -> None:
    async with stack() as s:
        s.decode.dead = True
        await until(lambda: not s.router.services.fleet.decodes[0].usable)
        async with s.http.get(f"{s.url}/ready") as response:
            assert response.status == 503
            assert (await response.json())["missing"] == ["no usable decode node"]
        async with s.http.get(f"{s.admin_url}/ready") as response:
            assert response.status == 503
            assert s.router.services.fleet.decodes[0].url in await response.text()
        answer = await s.post(CHAT, {"model": "double", "messages": opening()})
        assert answer.status == 503
        assert answer.headers["retry-after"]


async def test_a_client_that_leaves_cancels_the_leg_that_runs() -> None:
    async with stack() as s:
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(opening()))
        await until(lambda: len(s.prefill.requests) == 1)
        turn.cancel()
        in_flight = s.router.services.metrics.in_flight
        await until(lambda: in_flight._value.get() == 0)
        s.prefill.hold.set()
        assert s.decode.requests == []


async def test_k16_a_client_that_leaves_mid_answer_cancels_d_and_nothing_stays_pinned() -> None:
    async with stack() as s:
        s.decode.pause_stream_after = 5
        body = {"model": "double", "messages": opening(), "stream": True, "max_tokens": 24}
        async with s.http.post(s.url + CHAT, json=body) as response:
            assert await response.content.readany()
            response.close()
        await until(lambda: s.decode.disconnects == 1)
        await until(lambda: s.decode.pinned_blocks == 0 and s.prefill.pinned_blocks == 0)
        assert len(s.router.services.ledger) == 0


async def test_a_prefill_node_that_drops_the_connection_is_tried_once_more() -> None:
    async with stack() as s:
        s.prefill.break_next = 1
        assert (await s.chat(opening())).route == "recompute"
        s.prefill.break_next = 2
        failed = await s.chat(opening("Something else."), right=False)
        assert failed.status == 502
        assert b"broke off" in failed.body


async def test_another_prefill_node_takes_over_for_one_that_cannot_be_reached() -> None:
    async with stack(prefills=2, settings={"probe_interval_s": 3600.0}) as s:
        gone = s.router.services.fleet.prefills[0]
        await until(lambda: all(e.usable for e in s.router.services.fleet.prefills))
        gone.url = "http://127.0.0.1:9"
        for _ in range(2):
            assert (await s.chat(opening())).status == 200
        assert not gone.usable


async def test_a_decode_node_that_breaks_off_gives_an_error_event_and_files_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kvloop.receipt")
    async with stack() as s:
        s.decode.break_stream_after = 4
        answer = await s.chat(opening(), right=False)
        assert answer.status == 200
        assert b'"error"' in answer.body
        assert b"[DONE]" not in answer.body
        assert len(s.router.services.ledger) == 0
        assert "connection broke" in caplog.text


async def test_a_prefill_node_that_hangs_on_a_pull_is_given_up_and_the_turn_goes_cold() -> None:
    async with stack(prefills=1, settings={"pull_timeout_s": 0.2}) as s:
        messages = opening()
        first = await s.chat(messages)
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(follow(messages, first.text)))
        await until(lambda: len(s.prefill.requests) >= 3)
        s.prefill.hold.set()
        assert (await turn).route == "recompute"


async def test_shutdown_gives_every_pinned_block_back() -> None:
    async with stack() as s:
        await s.chat(opening())
        await s.chat(opening("Another conversation entirely, about mountains."))
        assert s.decode.pinned_blocks > 0
        await s.router._give_everything_back()
        assert s.decode.pinned_blocks == 0
