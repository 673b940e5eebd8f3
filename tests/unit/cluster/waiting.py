"""Waiting for conditions on other processes, bounded."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 20.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Return as soon as ``condition`` holds; fail the test if it does not come to hold."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen: {what}"
        await asyncio.sleep(0.01)


async def word_after(word: str, log: Path) -> str:
    """The word that follows ``word`` at the start of a line of the log, once it is there."""

    def found() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(word)]

    await until(lambda: bool(found()), f"{word!r} in {log}")
    return found()[-1].removeprefix(word).strip()


def alive(pid: int) -> bool:
    """Whether a process exists that is not merely waiting to be collected."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
