"""A claimed reference on its way through a turn: in the end D has freed it, whatever happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from kvloop.ledger.pins import PinState
from kvloop.turn.releasing import release

if TYPE_CHECKING:
    from kvloop.ledger.reference import ClaimedReference
    from kvloop.turn.services import Services


class Attachment:
    """Use as a context manager around all that may use the reference; released if nobody did."""

    def __init__(self, claimed: ClaimedReference | None, services: Services) -> None:
        """``claimed``: None if this turn attaches nothing; every method is then without effect."""
        self._claimed = claimed
        self._services = services
        if claimed is not None:
            services.pins.move(claimed.reference_id, PinState.CLAIMED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def in_time(self, now_s: float) -> bool:
        """Whether P may still be sent to read it."""
        return self._claimed is not None and now_s < self._claimed.reference.deadline_s

    def was_read(self) -> None:
        """P has read it, which told D to free it."""
        if self._claimed is not None:
            self._services.pins.gone(self._claimed.reference_id)
            self._claimed = None

    def release(self) -> None:
        """Have D free it, unless it was read or released before."""
        if self._claimed is not None:
            claimed = self._claimed
            release(claimed.reference_id, claimed.reference.decode, claimed.params, self._services)
            self._claimed = None

    def hand_over(self) -> Attachment:
        """The attachment for whoever sees to it when this turn has ended."""
        heir = Attachment(self._claimed, self._services)
        self._claimed = None
        return heir
