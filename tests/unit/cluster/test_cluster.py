from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvloop.cluster.cluster import LocalCluster
from kvloop.cluster.layout import decode_spec, prefill_spec
from kvloop.cluster.process import EngineStartError
from kvloop.engines.fleet import Role
from tests.unit.cluster.programs import DEAF, SERVES, python
from tests.unit.cluster.waiting import word_after

if TYPE_CHECKING:
    from kvloop.cluster.engine_spec import EngineSpec

MODEL = Path("/models/small")


def serves(spec: EngineSpec) -> list[str]:
    return python(SERVES, spec.port)


def decode_fails(spec: EngineSpec) -> list[str]:
    return python("raise ValueError('bad')") if spec.role is Role.DECODE else serves(spec)


def decode_hangs(spec: EngineSpec) -> list[str]:
    return python(DEAF) if spec.role is Role.DECODE else serves(spec)


def pair() -> list[EngineSpec]:
    return [prefill_spec(MODEL), decode_spec(MODEL)]


async def test_all_engines_serve_inside_and_none_is_left_after(tmp_path: Path) -> None:
    specs, reports = pair(), list[str]()
    async with LocalCluster(specs, tmp_path, reports.append, command=serves) as cluster:
        assert cluster.url("prefill-0") == specs[0].url
        assert cluster.urls(Role.DECODE) == (specs[1].url,)
        assert cluster.running("prefill-0")
        assert cluster.running("decode-0")
    assert not cluster.running("prefill-0")
    assert not cluster.running("decode-0")
    assert sorted(report.split(" after ")[0] for report in reports) == [
        "decode-0 ready",
        "prefill-0 ready",
    ]


async def test_one_that_fails_ends_the_start_and_the_others(tmp_path: Path) -> None:
    cluster = LocalCluster(pair(), tmp_path, lambda _: None, command=decode_fails)
    with pytest.raises(EngineStartError) as raised:
        async with cluster:
            pytest.fail("entered although decode-0 failed")
    assert raised.value.name == "decode-0"
    assert raised.value.reason == "ValueError: bad"
    assert not cluster.running("prefill-0")


async def test_an_error_inside_stops_all_and_comes_through(tmp_path: Path) -> None:
    cluster = LocalCluster(pair(), tmp_path, lambda _: None, command=serves)
    with pytest.raises(KeyError, match="mine"):
        async with cluster:
            raise KeyError("mine")
    assert not cluster.running("prefill-0")
    assert not cluster.running("decode-0")


async def test_cancelled_while_starting_it_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloop.cluster.process._TERM_GRACE_S", 0.1)
    cluster = LocalCluster(pair(), tmp_path, lambda _: None, command=decode_hangs)

    async def enter() -> None:
        async with cluster:
            pytest.fail("entered although decode-0 never serves")

    starting = asyncio.create_task(enter())
    await word_after("deaf", cluster.log("decode-0"))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not cluster.running("prefill-0")
    assert not cluster.running("decode-0")


async def test_a_killed_engine_comes_back_on_the_same_address(tmp_path: Path) -> None:
    reports = list[str]()
    async with LocalCluster(pair(), tmp_path, reports.append, command=serves) as cluster:
        address = cluster.url("decode-0")
        await cluster.kill("decode-0")
        assert not cluster.running("decode-0")
        assert cluster.running("prefill-0")
        await cluster.restart("decode-0")
        assert cluster.running("decode-0")
        assert cluster.url("decode-0") == address
    assert reports[-1].startswith("decode-0 ready again after ")


async def test_logs_lie_in_the_run_folder_by_name(tmp_path: Path) -> None:
    async with LocalCluster(pair(), tmp_path / "run", lambda _: None, command=serves) as cluster:
        assert cluster.log("prefill-0") == tmp_path / "run" / "prefill-0.log"
        assert await word_after("serving", cluster.log("prefill-0")) == ""


def test_two_engines_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same name"):
        LocalCluster([prefill_spec(MODEL), prefill_spec(MODEL)], tmp_path, print)
