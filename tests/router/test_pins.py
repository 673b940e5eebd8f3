"""What D pins for later turns: accounted for, bounded, given back early."""

import asyncio
import itertools
import re
from dataclasses import replace
from typing import Any

from kvloop.engines.client import EngineClient, Reply
from kvloop.ledger.pins import PinState
from kvloop.turn.release_check import frees_on_release
from tests.double.engine import pinned_tokens
from tests.double.http import until
from tests.router.stack import Stack, follow, opening, stack

_topics = itertools.count()


def another() -> list[dict[str, Any]]:
    """The first messages of a conversation of its own."""
    return opening(f"Tell me about topic {next(_topics)}.")


def held(s: Stack) -> int:
    return s.router.services.pins.tokens(s.router.services.fleet.decodes[0].url)


async def agreed(s: Stack) -> None:
    """Until D pins what the router thinks that it pins."""
    await until(
        lambda: (
            held(s) == 16 * s.decode.pinned_blocks
            and not s.router.services.pins.tokens(
                s.router.services.fleet.decodes[0].url, PinState.LEAVING
            )
        )
    )


async def test_the_account_agrees_with_what_d_pins() -> None:
    async with stack() as s:
        messages = another()
        for _ in range(3):
            answer = await s.chat(messages)
            messages = follow(messages, answer.text)
            await agreed(s)
            assert s.decode.pinned_blocks > 0
        await s.chat(messages, headers={"x-kvloop-reuse": "off"})
        await agreed(s)


async def test_k12_pins_stay_within_the_budget() -> None:
    async with stack(num_blocks=200, settings={"pin_budget": 0.25}) as s:
        for _ in range(12):
            await s.chat(another())
            await agreed(s)
            assert 0 < pinned_tokens(s.decode) <= 0.25 * 200 * 16


async def test_k12_conversations_that_go_on_outlive_one_shot_requests() -> None:
    async with stack(num_blocks=200, settings={"pin_budget": 0.5}) as s:
        messages = another()
        for _ in range(2):
            messages = follow(messages, (await s.chat(messages)).text)
        for _ in range(12):
            await s.chat(another())
        assert (await s.chat(messages)).route == "pull"


async def test_k12_one_turn_larger_than_the_budget_is_not_kept() -> None:
    async with stack(num_blocks=200, settings={"pin_budget": 0.02}) as s:
        await s.chat(another())
        await until(lambda: s.decode.pinned_blocks == 0)
        assert held(s) == 0


async def test_k12_a_request_that_waits_for_memory_gets_that_of_idle_conversations() -> None:
    async with stack(num_blocks=60, settings={"pin_budget": 1.0}) as s:
        for _ in range(3):
            await s.chat(another())
        filled = s.decode.pinned_blocks
        assert filled > 40
        async with asyncio.timeout(10):  # the pins' own end is 480 s away
            await s.chat(another(), max_tokens=200)


async def test_a_turn_that_is_said_to_be_the_last_leaves_nothing_pinned() -> None:
    async with stack() as s:
        messages = another()
        first = await s.chat(messages)
        answer = await s.chat(follow(messages, first.text), headers={"x-kvloop-reuse": "last"})
        assert answer.route == "pull"
        await until(lambda: s.decode.pinned_blocks == 0)
        assert held(s) == 0


async def test_k09_a_restart_between_two_probes_is_noticed_by_the_engine_id() -> None:
    async with stack(settings={"probe_interval_s": 1000.0}) as s:
        messages, other = another(), another()
        first = await s.chat(messages)
        s.decode.restart()
        await s.chat(other)  # its reference bears a new engine id
        answer = await s.chat(follow(messages, first.text))
        assert "nothing_proven" in answer.headers["x-kvloop-route"]
        await agreed(s)


async def test_k16_a_client_that_leaves_during_the_p_leg_strands_no_blocks() -> None:
    async with stack() as s:
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(another()))
        await until(lambda: s.prefill.requests)
        turn.cancel()
        await asyncio.wait([turn])
        s.prefill.hold.set()  # P now computes it for nobody
        await until(lambda: "answered" in str(s.router.services.metrics.render()))
        await until(lambda: s.prefill.pinned_blocks == 0)
        assert s.prefill.disconnects == 0


async def test_k16_a_p_leg_that_goes_on_for_too_long_is_aborted() -> None:
    async with stack(settings={"orphan_grace_s": 0.05}) as s:
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(another()))
        await until(lambda: s.prefill.requests)
        turn.cancel()
        await asyncio.wait([turn])
        await until(lambda: b'outcome="aborted"} 1.0' in s.router.services.metrics.render())
        s.prefill.hold.set()
        await until(lambda: s.prefill.pinned_blocks == 0)


async def test_k16_a_client_that_leaves_during_a_pull_gives_both_sides_blocks_back() -> None:
    async with stack() as s:
        messages = another()
        first = await s.chat(messages)
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(follow(messages, first.text)))
        await until(lambda: len(s.prefill.requests) == 2)
        turn.cancel()
        await asyncio.wait([turn])
        s.prefill.hold.set()
        await until(lambda: s.prefill.pinned_blocks == 0 and s.decode.pinned_blocks == 0)
        await agreed(s)


async def test_each_decode_node_is_tried_once_whether_releases_work() -> None:
    async with stack(settings={"check_releases": True}) as s:
        decode = s.router.services.fleet.decodes[0]
        await until(lambda: decode.frees_on_release is True)
        assert s.decode.pinned_blocks == s.prefill.pinned_blocks == 0
        tried = len(s.decode.requests)
        await s.chat(another())
        assert len(s.decode.requests) == tried + 1
        s.decode.restart()
        await until(lambda: len(s.decode.requests) == tried + 2)  # another life, another try
        await until(lambda: decode.frees_on_release is True)


async def test_where_releases_do_not_work_pins_are_left_to_their_deadline() -> None:
    async with stack(settings={"check_releases": True}) as s:
        decode = s.router.services.fleet.decodes[0]
        s.decode.ignores_notices = True
        s.decode.restart()
        await until(lambda: decode.frees_on_release is False, timeout_s=20)
        asked = len(s.prefill.requests)
        await s.chat(another(), headers={"x-kvloop-reuse": "last"})
        assert s.router.services.pins.tokens(decode.url, PinState.STUCK) > 0
        assert len(s.prefill.requests) == asked + 1  # nobody is asked to release it
        ready = await s.http.get(f"{s.admin_url}/ready")
        assert "does not free blocks" in await ready.text()
        s.fabric.now_s += 480.0
        s.router.services.pins.expire(s.fabric.now_s)
        assert s.router.services.pins.tokens(decode.url) == 0


async def test_a_check_that_cannot_tell_leaves_nothing_pinned() -> None:
    async with stack() as s:
        services = s.router.services
        decode, prefill = services.fleet.decodes[0], services.fleet.prefills[0]
        services = replace(services, client=BusyMeanwhile(services.client, s))  # type: ignore[arg-type]
        assert await frees_on_release(prefill, decode, services) is None
        assert s.decode.pinned_blocks > 0
        await until(lambda: s.decode.pinned_blocks == s.prefill.pinned_blocks == 0)
        await agreed(s)


class BusyMeanwhile:
    """An engine client that finds D busy from its first pin on."""

    def __init__(self, client: EngineClient, s: Stack) -> None:
        self._client, self._stack = client, s

    async def get(self, *args: Any, **kwargs: Any) -> Reply:
        reply = await self._client.get(*args, **kwargs)
        if self._stack.decode.pinned_blocks == 0:
            return reply
        return replace(reply, body=re.sub(rb"(num_requests_running\S*) \S+", rb"\1 1", reply.body))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
