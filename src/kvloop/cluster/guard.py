"""The guard: a tiny process between kvloop and one child; nothing of the child outlives either.

Run as a script, by path, with the standard library only: it must start in milliseconds and never
imports kvloop. vLLM's engine is a tree of processes, and a parent that dies by ``kill -9`` can
clean nothing up. So the guard holds one end of a pipe (the lifeline) whose other end only the
parent has: when it closes, for whatever reason, the guard kills the tree. Descendants whose own
parent is gone become the guard's children (Linux's child subreaper), so none escapes, not even by
leaving the process group. When the guard has ended, nothing of the child is left.

    guard.py LIFELINE_FD CORES_OR_DASH COMMAND [ARGUMENT...]

SIGTERM is passed on to the child's process group. The exit code is the child's, 128 + n if signal
n ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_COMMAND_NOT_FOUND = 127
_TRACKERS_GRACE_S = 2.0
_LOOK_AGAIN_S = 0.05


def main(arguments: list[str]) -> int:
    """Start the child, wait for its end or the lifeline's, leave nothing; returns the exit code."""
    lifeline, cores, command = int(arguments[0]), arguments[1], arguments[2:]
    os.set_inheritable(lifeline, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if cores != "-":
        os.sched_setaffinity(0, map(int, cores.split(",")))
    wake, wake_by_signal = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_by_signal, False)
    signal.set_wakeup_fd(wake_by_signal, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _only_wake)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        _become(command, guard, libc)
    with contextlib.suppress(OSError):  # the child does the same: whoever comes first
        os.setpgid(child, child)
    code = _watch(child, lifeline, wake)
    code_of_killed = _end_descendants(child, wake)
    return code_of_killed if code is None else code


def _only_wake(*_: object) -> None:
    """Signals reach the loop through the wake-up pipe."""


def _become(command: list[str], guard: int, libc: ctypes.CDLL) -> None:
    """In the forked child: turn into the command."""
    os.setpgid(0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case somebody kills the guard itself
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        if os.getppid() == guard:
            os.execvp(command[0], command)  # noqa: S606 - the point of this program
    except OSError as error:
        sys.stderr.write(f"{type(error).__name__}: {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    finally:
        os._exit(_COMMAND_NOT_FOUND)


def _watch(child: int, lifeline: int, wake: int) -> int | None:
    """The child's exit code once it has ended by itself; None once the lifeline has."""
    while True:
        readable, _, _ = select.select([lifeline, wake], [], [])
        if lifeline in readable:
            return None
        if signal.SIGTERM in os.read(wake, 4096):
            _signal_group(child, signal.SIGTERM)
        _, code = _reap(child)
        if code is not None:
            return code


def _reap(child: int) -> tuple[bool, int | None]:
    """Collect whoever has ended: whether any is left, the child's exit code if it was among them"""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, code
        if pid == 0:
            return True, code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


def _end_descendants(child: int, wake: int) -> int:
    """Kill and collect all that is left below the guard; the child's exit code if it was there.

    Python's resource trackers come last: they delete what the killed leave in /dev/shm (a quarter
    of a GiB for each vLLM engine), and then end by themselves.
    """
    child_code = 128 + signal.SIGKILL
    deadline_s = time.monotonic() + _TRACKERS_GRACE_S
    while True:
        late = time.monotonic() > deadline_s
        for pid in _members(child):
            if late or not _is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        any_left, code = _reap(child)
        child_code = child_code if code is None else code
        if not any_left:
            return child_code
        if select.select([wake], [], [], _LOOK_AGAIN_S)[0]:
            os.read(wake, 4096)


def _members(group: int) -> list[int]:
    """Who belongs to the child's process group or has become the guard's own child."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                _, parent, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group or int(parent) == os.getpid():
                    members.append(int(entry.name))
    return members


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
