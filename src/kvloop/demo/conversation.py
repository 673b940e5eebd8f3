"""The conversation: an agent that works through tool results. Data only, the same at every run."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

Message: TypeAlias = dict[str, Any]

MAX_TOKENS: Final = 24

_RULES: Final = (
    "Read the tool's output before you answer.",
    "Quote the line of the log that supports what you say.",
    "Never guess a value that a tool can give you.",
    "Name the service, the host and the time of every finding.",
    "Keep each answer to one or two sentences.",
    "Say which tool you would call next, and why.",
    "If two findings contradict each other, say so and check again.",
    "Do not repeat what was already established in the conversation.",
    "Treat timestamps as UTC and durations as seconds.",
    "Report memory in MiB and latencies in milliseconds.",
)
_TOOLS: Final = (
    ("read_log", "path, first_line, num_lines", "the lines of a log file"),
    ("query_metric", "name, host, from_time, to_time", "samples of a time series"),
    ("list_deployments", "service, since", "deployments with author, version and time"),
    ("describe_host", "host", "cores, memory, kernel, and what runs there"),
    ("diff_config", "service, version_a, version_b", "changed settings of a service"),
    ("trace_request", "request_id", "spans of a request with service and duration"),
)
_FINDINGS: Final = (
    "checkout-api latency p99 rose from 180 ms to 2400 ms at 10:42 on host web-3",
    "deployment 4711 of checkout-api by dana at 10:40 changed the pool from 64 to 8 connections",
    "postgres-1 shows 8 active sessions from web-3 and 63 from each other host",
    "trace 9f31 waits 2210 ms for a pooled connection and 14 ms in the database",
    "the change 64 to 8 is in pool.max_size, commit message: lower idle connections",
    "after the rollback at 11:05 p99 on web-3 is 175 ms, with 61 active sessions",
)


def opening(salt: str) -> list[Message]:
    """The first messages; ``salt`` makes the run's texts new to every cache."""
    tools = "\n".join(f"- {name}({arguments}): returns {what}" for name, arguments, what in _TOOLS)
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_RULES, 1))
    system = (
        f"You are an operations agent (run {salt}). You find out why a service is slow.\n"
        f"Your rules:\n{rules}\nYour tools:\n{tools}\n"
        + "\n".join(_background(number) for number in range(14))
    )
    task = "Customers say that paying takes very long since this morning. Find out why."
    return [{"role": "system", "content": system}, {"role": "user", "content": task}]


def tool_result(turn: int) -> list[Message]:
    """What the tools said after the assistant's turn number ``turn`` (from 1)."""
    finding = _FINDINGS[(turn - 1) % len(_FINDINGS)]
    lines = [
        f"10:{40 + turn}:{second:02d} web-{second % 4 + 1} checkout-api status=200 "
        f"time={170 + 7 * second} ms"
        for second in range(turn, turn + 3)
    ]
    return [{"role": "user", "content": "\n".join([f"Tool output: {finding}.", *lines])}]


def _background(number: int) -> str:
    return (
        f"Service note {number + 1}: service-{number + 1} runs on web-{number % 4 + 1} with "
        f"{8 + number} workers, talks to postgres-{number % 3 + 1}, and its normal p99 is "
        f"{120 + 15 * number} ms."
    )
