from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvloop.cluster import process
from kvloop.cluster.layout import free_ports
from kvloop.cluster.process import ChildProcess, EngineStartError
from tests.unit.cluster.programs import (
    DEAF,
    HAS_A_CHILD,
    HOLDS_SHARED_MEMORY,
    LEAVES_AN_ORPHAN,
    SERVES,
    SLEEPS,
    python,
)
from tests.unit.cluster.waiting import alive, until, word_after

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NOBODY = "http://127.0.0.1:9/health"  # nothing listens there


@asynccontextmanager
async def child(tmp_path: Path, command: list[str], **fields: Any) -> AsyncIterator[ChildProcess]:
    one = ChildProcess("it", command, {"PATH": os.environ["PATH"]}, tmp_path / "it.log", **fields)
    try:
        one.start()
        yield one
    finally:
        await one.kill()


async def test_a_child_that_serves_becomes_ready_and_stops(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with child(tmp_path, python(SERVES, port)) as one:
        await one.wait_ready(f"http://127.0.0.1:{port}/health", 20)
        await one.stop()
        assert not one.running
        assert one.exit_code == 128 + signal.SIGTERM


async def test_a_child_that_fails_is_reported_at_once_with_its_reason(tmp_path: Path) -> None:
    program = "print('before'); raise ValueError('no common block size')"
    async with child(tmp_path, python(program)) as one:
        with pytest.raises(EngineStartError) as raised:
            await one.wait_ready(NOBODY, 600)
    error = raised.value
    assert error.reason == "ValueError: no common block size"
    assert error.exit_code == 1
    assert error.log == tmp_path / "it.log"
    assert "before" in error.last_lines
    assert "it ended with exit code 1: ValueError: no common block size" in str(error)
    assert str(tmp_path / "it.log") in str(error)


async def test_a_fatal_line_in_the_log_is_enough_though_the_process_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_FATAL_GRACE_S", 0.1)
    program = (
        "print('ValueError: bad'); print('EngineCore failed to start.', flush=True);"
        "import time; time.sleep(600)"
    )
    async with child(tmp_path, python(program)) as one:
        with pytest.raises(EngineStartError, match="it failed to start: ValueError: bad") as raised:
            await one.wait_ready(NOBODY, 600)
        assert raised.value.exit_code is None


async def test_a_child_that_never_serves_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    async with child(tmp_path, python(SLEEPS)) as one:
        with pytest.raises(EngineStartError, match=r"was not ready after 0 s"):
            await one.wait_ready(NOBODY, 0.3)


async def test_a_command_that_does_not_exist_is_a_start_error(tmp_path: Path) -> None:
    async with child(tmp_path, ["/no/such/program"]) as one:
        with pytest.raises(EngineStartError, match="FileNotFoundError: /no/such/program"):
            await one.wait_ready(NOBODY, 600)
        assert one.exit_code == 127


async def test_a_restarted_child_is_not_blamed_for_its_last_lifes_errors(tmp_path: Path) -> None:
    async with child(tmp_path, python("raise ValueError('old')")) as one:
        await until(lambda: not one.running, "the first life's end")
        one._command = python("raise SystemExit('KeyError: new')")
        one.start()
        with pytest.raises(EngineStartError) as raised:
            await one.wait_ready(NOBODY, 600)
    assert raised.value.reason == "KeyError: new"
    assert "ValueError: old" in (tmp_path / "it.log").read_text()


async def test_a_running_child_is_not_started_twice(tmp_path: Path) -> None:
    async with child(tmp_path, python(SLEEPS)) as one:
        with pytest.raises(RuntimeError, match="runs already"):
            one.start()


async def test_stopping_a_deaf_child_kills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_TERM_GRACE_S", 0.1)
    async with child(tmp_path, python(DEAF)) as one:
        await word_after("deaf", one.log)
        await one.stop()
        assert not one.running
        assert one.exit_code == 128 + signal.SIGKILL


@pytest.mark.parametrize("end", [ChildProcess.stop, ChildProcess.kill])
async def test_no_descendant_survives_not_even_one_in_a_session_of_its_own(
    tmp_path: Path, end: Any
) -> None:
    async with child(tmp_path, python(LEAVES_AN_ORPHAN)) as one:
        orphan = int(await word_after("orphan", one.log))
        assert alive(orphan)
        await end(one)
        assert not alive(orphan)


async def test_a_child_that_ends_by_itself_leaves_nothing_either(tmp_path: Path) -> None:
    program = LEAVES_AN_ORPHAN.rsplit("time.sleep(600)", 1)[0] + "os.wait()"
    async with child(tmp_path, python(program)) as one:
        orphan = int(await word_after("orphan", one.log))
        await until(lambda: not one.running, "the guard's end")
        assert one.exit_code == 0
        assert not alive(orphan)


async def test_a_killed_childs_shared_memory_is_deleted(tmp_path: Path) -> None:
    async with child(tmp_path, python(HOLDS_SHARED_MEMORY)) as one:
        held = Path("/dev/shm", await word_after("shared", one.log))
        assert held.exists()
        await one.kill()
        assert not held.exists()


async def test_kill_9_of_the_parent_leaves_nothing(tmp_path: Path) -> None:
    parent_program = f"""
import os, time
from pathlib import Path
from kvloop.cluster.process import ChildProcess
one = ChildProcess("it", {python(LEAVES_AN_ORPHAN)!r}, dict(os.environ), Path("it.log"))
one.start()
print(one._guard.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent_program], cwd=tmp_path, stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout is not None
            guard = int(await asyncio.to_thread(parent.stdout.readline))
            orphan = int(await word_after("orphan", tmp_path / "it.log"))
            assert alive(guard)
            assert alive(orphan)
        finally:
            parent.kill()
    await until(lambda: not alive(orphan), "the orphan's end")
    await until(lambda: not alive(guard), "the guard's end")


async def test_whoever_kills_the_guard_leaves_nothing_once_the_child_is_stopped(
    tmp_path: Path,
) -> None:
    async with child(tmp_path, python(HAS_A_CHILD)) as one:
        grandchild = int(await word_after("grandchild", one.log))
        assert one._guard is not None
        one._guard.kill()
        await until(lambda: not one.running, "the guard's end")
        assert alive(grandchild)
        await one.stop()
        await until(lambda: not alive(grandchild), "the grandchild's end")


async def test_a_terminals_ctrl_c_does_not_reach_the_child(tmp_path: Path) -> None:
    async with child(tmp_path, python("import os; print('session', os.getsid(0), flush=True)")):
        session = int(await word_after("session", tmp_path / "it.log"))
    assert session != os.getsid(0)


async def test_a_child_is_bound_to_its_cores(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    program = "import os; print('cores', os.sched_getaffinity(0), flush=True)"
    async with child(tmp_path, python(program), cores=(core,)):
        assert await word_after("cores", tmp_path / "it.log") == str({core})
