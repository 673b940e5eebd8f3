"""Serving under faults: queues are bounded, failing engines are left alone, waits end."""

import asyncio
import json
from typing import Any

from tests.double.http import kill, revive, until
from tests.router.stack import Answer, Stack, follow, opening, stack


def error(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["code"] == answer.status
    return found


async def test_more_turns_than_may_wait_are_told_to_come_back() -> None:
    limits = {"prefill_concurrency": 1, "queue_limit": 1}
    async with stack(settings=limits) as s:
        s.prefill.hold = asyncio.Event()
        waiting = [asyncio.create_task(s.chat(opening(str(n)))) for n in range(2)]
        gate = s.router.services.fleet.prefills[0].gate
        assert gate is not None
        await until(lambda: gate.running == 1 and gate.waiting == 1)
        refused = await s.chat(opening("one too many"), right=False)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "prefill nodes are busy" in error(refused)["message"]
        s.prefill.hold.set()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_wait_in_the_queue_ends() -> None:
    limits = {"decode_concurrency": 1, "queue_timeout_s": 0.05}
    async with stack(settings=limits) as s:
        s.decode.token_gate = asyncio.Semaphore(0)
        first = asyncio.create_task(s.chat(opening()))
        await until(lambda: s.decode.running)
        refused = await s.chat(opening("another"), right=False)
        assert refused.status == 503
        assert "retry-after" in refused.headers
        assert s.prefill.pinned_blocks == 0 or len(s.prefill.requests) == 1  # no P leg for nothing
        for _ in range(40):
            s.decode.token_gate.release()
        assert (await first).status == 200


async def test_k05_a_reference_that_lapses_in_the_queue_is_not_attached() -> None:
    async with stack(settings={"prefill_concurrency": 1}) as s:
        messages = opening()
        first = await s.chat(messages)
        s.prefill.hold = asyncio.Event()
        ahead = asyncio.create_task(s.chat(opening("something else")))
        await until(lambda: len(s.prefill.requests) == 2)
        turn = asyncio.create_task(s.chat(follow(messages, first.text)))
        gate = s.router.services.fleet.prefills[0].gate
        assert gate is not None
        await until(lambda: gate.waiting == 1)
        s.fabric.now_s += 470  # less than the TTL, more than the TTL less the margin
        s.prefill.hold.set()
        await ahead
        answer = await turn
        assert answer.route == "recompute"
        assert "reference_lapsed" in answer.headers["x-kvloop-route"]
        assert s.prefill.counters.expired_requests == 0


async def test_an_engine_that_hangs_again_and_again_is_left_alone() -> None:
    async with stack(prefills=2, settings={"prefill_timeout_s": 0.1}) as s:
        s.prefills[0].hold = asyncio.Event()  # it takes requests and never answers
        statuses = [(await s.chat(opening(str(n)), right=False)).status for n in range(20)]
        assert statuses.count(504) == 5
        assert statuses[-8:] == [200] * 8
        asked = len(s.prefills[0].requests)
        s.fabric.now_s += 2.0  # the pause is over: one tries, and everybody is back
        s.prefills[0].hold.set()
        s.prefills[0].hold = None
        for n in range(6):
            assert (await s.chat(opening(f"again {n}"))).status == 200
        assert len(s.prefills[0].requests) >= asked + 2


async def test_when_nobody_is_left_the_client_is_told_when_to_come_back() -> None:
    async with stack(settings={"prefill_timeout_s": 0.05}) as s:
        s.prefill.hold = asyncio.Event()
        for n in range(5):
            assert (await s.chat(opening(str(n)), right=False)).status == 504
        refused = await s.chat(opening("six"), right=False)
        assert refused.status == 503
        assert "retry-after" in refused.headers
        s.prefill.hold.set()
        s.fabric.now_s += 1.0
        assert (await s.chat(opening("seven"))).status == 200


async def test_k11_pulls_that_fail_between_two_engines_stop_for_a_while() -> None:
    async with stack() as s:
        conversations = [opening(str(n)) for n in range(5)]
        answers = [await s.chat(messages) for messages in conversations]
        s.prefill.refuse_next = []
        routes = []
        for messages, answer in zip(conversations, answers, strict=True):
            if len(routes) < 3:
                s.prefill.refuse_next = [500]
            after = await s.chat(follow(messages, answer.text))
            routes.append(after.headers["x-kvloop-route"].rpartition("=")[2])
            s.prefill.refuse_next = []
        assert routes == ["pull_refused"] * 3 + ["pair_off"] * 2
        s.fabric.now_s += 6.0
        again = await s.chat(opening("0"))
        assert (await s.chat(follow(opening("0"), again.text))).route == "pull"


async def test_a_bad_request_does_not_count_against_the_pair() -> None:
    async with stack() as s:
        for n in range(5):
            messages = opening(str(n))
            answer = await s.chat(messages)
            s.prefill.refuse_next = [400, 400]
            refused = await s.chat(follow(messages, answer.text), right=False)
            assert refused.status == 400
        messages = opening("good")
        answer = await s.chat(messages)
        assert (await s.chat(follow(messages, answer.text))).route == "pull"


async def test_a_d_that_never_begins_is_given_up_and_p_gets_its_blocks_back() -> None:
    async with stack(settings={"first_byte_timeout_s": 0.1}) as s:
        s.decode.pause_stream_after = 0
        answer = await s.chat(opening(), right=False)
        assert b"broke off" in answer.body
        await until(lambda: s.decode.disconnects == 1 and not s.decode.running)
        await until(lambda: s.prefill.pinned_blocks == 0)


async def test_an_answer_that_never_ends_is_ended() -> None:
    async with stack(settings={"decode_timeout_s": 60.0}) as s:
        s.decode.token_gate = asyncio.Semaphore(3)
        turn = asyncio.create_task(s.chat(opening(), right=False))
        await until(lambda: s.decode.running and s.decode.running[0].output)
        s.fabric.now_s += 61.0
        s.decode.token_gate.release()
        answer = await turn
        assert b"broke off" in answer.body
        await until(lambda: not s.decode.running)


async def test_the_time_d_takes_to_begin_counts_as_well() -> None:
    async with stack(settings={"decode_timeout_s": 60.0}) as s:
        s.decode.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(opening(), right=False))
        await until(lambda: s.decode.requests)
        s.fabric.now_s += 61.0
        s.decode.hold.set()
        answer = await turn
        assert b"broke off" in answer.body
        await until(lambda: not s.decode.running)


async def test_a_killed_d_frees_its_pins_in_the_account_and_serves_again() -> None:
    async with stack() as s:
        messages = opening()
        first = await s.chat(messages)
        await kill(s.decode)
        refused = await s.chat(follow(messages, first.text), right=False)
        assert refused.status in (502, 503)
        await revive(s.decode)
        await until(lambda: s.router.services.fleet.decodes[0].usable)
        answer = await s.chat(follow(messages, first.text))
        assert answer.route == "recompute"
        await until(lambda: _agrees(s))


def _agrees(s: Stack) -> bool:
    services = s.router.services
    return services.pins.tokens(services.fleet.decodes[0].url) == 16 * s.decode.pinned_blocks
