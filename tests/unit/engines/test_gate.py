"""The gate: bounded places, a bounded queue, served in order, nothing lost."""

import asyncio
import random

import pytest

from kvloop.engines.gate import Gate, QueueFullError, QueueTimeoutError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Visitor:
    """Somebody who wants in, and stays until told."""

    def __init__(self, gate: Gate, timeout_s: float = 60.0) -> None:
        self.inside, self.done = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._visit(gate, timeout_s))

    async def _visit(self, gate: Gate, timeout_s: float) -> None:
        async with gate.slot(timeout_s):
            self.inside.set()
            await self.done.wait()

    async def leave(self) -> None:
        self.done.set()
        await self.task


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_as_there_are_places_and_the_rest_in_order() -> None:
    gate = Gate(2, 10, Clock())
    visitors = [Visitor(gate) for _ in range(5)]
    await settled()
    assert [one.inside.is_set() for one in visitors] == [True, True, False, False, False]
    assert (gate.running, gate.waiting) == (2, 3)
    await visitors[1].leave()
    await settled()
    assert [one.inside.is_set() for one in visitors] == [True, True, True, False, False]
    for one in visitors:
        await one.leave()
    assert (gate.running, gate.waiting) == (0, 0)


async def test_a_full_queue_turns_away_at_once() -> None:
    gate = Gate(1, 1, Clock())
    visitors = [Visitor(gate), Visitor(gate)]
    await settled()
    assert gate.is_full
    with pytest.raises(QueueFullError) as refused:
        await Visitor(gate).task
    assert refused.value.retry_after_s >= 1
    for one in visitors:
        await one.leave()


async def test_a_wait_that_is_too_long_ends_and_leaves_no_trace() -> None:
    gate = Gate(1, 5, Clock())
    first = Visitor(gate)
    await settled()
    with pytest.raises(QueueTimeoutError):
        await Visitor(gate, timeout_s=0.01).task
    assert gate.waiting == 0
    await first.leave()
    assert gate.running == 0


async def test_when_to_come_back_follows_the_pace_of_late() -> None:
    clock = Clock()
    gate = Gate(1, 10, clock)
    for _ in range(100):
        async with gate.slot(1.0):
            clock.now_s += 20.0
    assert 19 <= gate.retry_after_s <= 20


async def test_places_are_never_lost_whoever_leaves_when() -> None:
    chance = random.Random(7)
    gate = Gate(3, 10_000, Clock())
    visitors: list[Visitor] = []
    tasks: list[asyncio.Task[None]] = []
    for _ in range(2000):
        match chance.choice(["come", "come", "cancel", "leave", "turn"]):
            case "come" if len(visitors) < 40:
                visitors.append(Visitor(gate))
                tasks.append(visitors[-1].task)
            case "cancel" if visitors:
                visitors.pop(chance.randrange(len(visitors))).task.cancel()
            case "leave" if visitors:
                visitors.pop(chance.randrange(len(visitors))).done.set()
            case _:
                await asyncio.sleep(0)
        assert gate.running <= 3
    for one in visitors:
        one.task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.running, gate.waiting) == (0, 0)
