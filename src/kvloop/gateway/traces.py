"""What is logged of an exception: where it happened and what kind it is, never what it says.

An exception's message may quote the data that it tripped over, which may be a prompt or a key.
"""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("kvloop.gateway")


def shape_of(error: object) -> str:
    """The calls that led to ``error`` and its type, with those of its causes; no messages."""
    if not isinstance(error, BaseException):
        return "no exception"
    lines = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = "".join(traceback.format_tb(cause.__traceback__))
        lines.append(f"{frames}{type(cause).__module__}.{type(cause).__qualname__}")
        if isinstance(cause, BaseExceptionGroup):
            lines += [shape_of(one) for one in cause.exceptions]
        cause = cause.__cause__ or cause.__context__
    return "\nbecause of:\n".join(lines)


def log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For ``loop.set_exception_handler``: errors of tasks that nobody waits for."""
    logger.error("%s\n%s", context.get("message"), shape_of(context.get("exception")))
