"""What a child's log says about why it failed.

Pure: text in, reason out. The shapes are those of vLLM's logs: lines prefixed with the process,
tracebacks of several processes one after the other, the cause first and its consequences after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_LAST_LINES: Final = 15

_PREFIX: Final = re.compile(
    r"^(\([\w :=.-]+\) )?"  # (EngineCore pid=123)
    r"((?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\] ?)?"
)
_EXCEPTION: Final = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Failure|Refused|Expired)\b(?::.*|)$"
)
_USAGE: Final = re.compile(r"^\S+: error: .+")
_CONSEQUENCE: Final = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError"
    r"|^SystemExit|^(asyncio\.exceptions\.)?CancelledError|^BrokenPipeError|^EOFError"
)
_FATAL: Final = re.compile(
    r"EngineCore failed to start|WorkerProc failed to start|EngineCore encountered a fatal error"
    r"|Engine core initialization failed"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a process failed, as far as its log tells."""

    reason: str | None
    """The line of the exception that came first; None if there is none."""
    last_lines: tuple[str, ...]


def failure(log: str) -> Failure:
    """What ``log`` tells: the root cause where it can be told apart, and the end of the log."""
    lines = log.splitlines()
    return Failure(_root_cause(lines), tuple(lines[-NUM_LAST_LINES:]))


def is_fatal(line: str) -> bool:
    """Whether an engine that logs this will not serve, though its process may live on a while."""
    return _FATAL.search(line) is not None


def _root_cause(lines: Sequence[str]) -> str | None:
    told = [line for line in map(_bare, lines) if _EXCEPTION.match(line) or _USAGE.match(line)]
    causes = [line for line in told if not _CONSEQUENCE.search(line)]
    return next(iter(causes or told), None)


def _bare(line: str) -> str:
    """The line without vLLM's prefixes; an indented line stays indented."""
    return _PREFIX.sub("", line, count=1).rstrip()
