"""One child process with everything it starts: begun, watched until ready, ended for good.

Nothing here knows what the child is. That nothing outlives a child, or this process, is the
guard's work (``guard.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp

from kvloop.cluster.failure import Failure, failure, is_fatal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GUARD: Final = Path(__file__).with_name("guard.py")
_POLL_S: Final = 0.25
_TERM_GRACE_S: Final = 15.0
_FATAL_GRACE_S: Final = 5.0
"""How long a child that logged a fatal error may take to end by itself, its log then complete."""
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)


class EngineStartError(Exception):
    """A child did not become ready. The message has the reason, the log's end and where it is."""

    def __init__(self, name: str, what: str, exit_code: int | None, log: Path, told: Failure):
        """``exit_code``: None if the child was still running; 128 + n if signal n ended it."""
        self.name = name
        self.exit_code = exit_code
        self.log = log
        self.reason = told.reason
        self.last_lines = told.last_lines
        because = f": {told.reason}" if told.reason else ""
        tail = "\n".join(f"  | {line}" for line in told.last_lines) or "  | (empty)"
        super().__init__(f"{name} {what}{because}\nThe end of its log, {log}:\n{tail}")


class ChildProcess:
    """A child in a session of its own, its output in a log file. Start, stop, start again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cores: Sequence[int] = (),
    ) -> None:
        """``cores``: the only ones that the child and its children may use; empty: any."""
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._cores = ",".join(map(str, cores)) or "-"
        self._guard: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._log_start = 0

    @property
    def running(self) -> bool:
        """Whether anything of the child is alive."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the child ended; None while it runs and before it was started."""
        return None if self._guard is None else self._guard.poll()

    def start(self) -> None:
        """Start it. A terminal's Ctrl-C does not reach it: who started it, stops it."""
        if self.running:
            raise RuntimeError(f"{self.name} runs already; stop it first")
        self._cut_lifeline()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        theirs, self._lifeline = os.pipe()
        try:
            with self.log.open("ab") as output:
                self._log_start = output.tell()
                self._guard = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", str(_GUARD)),
                        *(str(theirs), self._cores, *self._command),
                    ],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(theirs,),
                )
        except OSError:
            self._cut_lifeline()
            raise
        finally:
            os.close(theirs)

    async def wait_ready(self, url: str, timeout_s: float) -> None:
        """Until ``url`` answers 200. Raises EngineStartError, early if the child fails."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as session,
            ):
                while not await _answers(session, url):
                    if not self.running:
                        raise self._failed(f"ended with exit code {self.exit_code}")
                    if any(map(is_fatal, self.log_text().splitlines())):
                        await self._ended_within(_FATAL_GRACE_S)
                        raise self._failed("failed to start")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._failed(f"was not ready after {timeout_s:.0f} s") from None

    def log_text(self) -> str:
        """What the child has logged since it was last started."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode("utf-8", errors="replace")

    async def stop(self) -> None:
        """Ask it to end, then make it; returns when nothing of it is left."""
        if self._guard is not None and self.running:
            self._guard.terminate()
            await self._ended_within(_TERM_GRACE_S)
        await self.kill()

    async def kill(self) -> None:
        """End all its processes at once, as a crash would; returns when they are gone."""
        self._cut_lifeline()
        await self._ended()
        if self._guard is not None and self._guard.returncode < 0:  # somebody killed the guard
            _kill_session(self._guard.pid)

    def kill_now(self) -> None:
        """Like :meth:`kill`, without waiting for the end."""
        self._cut_lifeline()

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _ended_within(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended()

    async def _ended(self) -> None:
        if self._guard is None or not self.running:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self._guard.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._guard.wait()

    def _failed(self, what: str) -> EngineStartError:
        told = failure(self.log_text())
        return EngineStartError(self.name, what, self.exit_code, self.log, told)


def _kill_session(session: int) -> None:
    """Kill what is left of a session whose leader is gone.

    vLLM's EngineCore lives on when only its API server is killed (seen with 0.32).
    """
    if Path(f"/proc/{session}").exists():
        return  # another process has that id by now
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    os.kill(int(entry.name), signal.SIGKILL)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
