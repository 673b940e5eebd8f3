"""Admission: counted, bounded, drained."""

from __future__ import annotations

import asyncio

import pytest

from kvloop.gateway.admission import Admission
from kvloop.gateway.errors import RefusedError


async def turn(admission: Admission, tenant: str, until: asyncio.Event) -> None:
    with admission.turn(tenant):
        await until.wait()


async def started(admission: Admission, *tenants: str) -> tuple[asyncio.Event, list[asyncio.Task]]:
    end = asyncio.Event()
    tasks = [asyncio.create_task(turn(admission, tenant, end)) for tenant in tenants]
    await asyncio.sleep(0)
    return end, tasks


@pytest.mark.parametrize(
    ("limits", "tenant", "status"),
    [((2, 0), "new", 429), ((9, 1), "ann", 429), ((9, 1), "new", None), ((3, 0), "ann", None)],
)
async def test_limits_are_of_all_turns_and_of_each_tenant(
    limits: tuple[int, int], tenant: str, status: int | None
) -> None:
    admission = Admission(*limits)
    end, tasks = await started(admission, "ann", "bob")
    if status is None:
        with admission.turn(tenant):
            assert len(admission) == 3
    else:
        with pytest.raises(RefusedError) as refused, admission.turn(tenant):
            pass
        assert refused.value.status == status
        assert refused.value.headers["retry-after"]
    end.set()
    await asyncio.gather(*tasks)
    assert len(admission) == 0
    with admission.turn("ann"):
        pass


async def test_draining_lets_nobody_in_and_waits_for_those_who_are() -> None:
    admission = Admission(9, 0)
    end, tasks = await started(admission, "ann", "bob")
    drained = asyncio.create_task(admission.drain(timeout_s=60, cut_off_s=60))
    await asyncio.sleep(0)
    with pytest.raises(RefusedError) as refused, admission.turn("ann"):
        pass
    assert (refused.value.status, refused.value.headers["connection"]) == (503, "close")
    assert not drained.done()
    end.set()
    await drained
    assert all(task.done() and not task.cancelled() for task in tasks)


async def test_turns_that_do_not_end_in_time_are_cancelled() -> None:
    admission = Admission(9, 0)
    _, tasks = await started(admission, "ann", "bob")
    await admission.drain(timeout_s=0.01, cut_off_s=60)
    assert len(admission) == 0
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
