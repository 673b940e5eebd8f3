"""How a turn can end without D's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloop.engines.client import Reply


class EngineRefusedError(Exception):
    """An engine answered with an error that is the client's to see, as the engine put it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"engine answered {reply.status}")
        self.reply = reply


class TurnFailedError(Exception):
    """No engine answered; ``status`` and the message are for the client."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
