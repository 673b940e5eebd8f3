"""Giving blocks back: D's pins that are of no more use, P's blocks that no D will read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvloop.ledger.pins import PinState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvloop.engines.fleet import Engine
    from kvloop.ledger.reference import ClaimedReference
    from kvloop.turn.services import Services


def release_claimed(
    references: Iterable[ClaimedReference], outcome: str, services: Services
) -> None:
    """Have D free what fell out of the ledger unused."""
    for claimed in references:
        services.metrics.references.labels(outcome=outcome).inc()
        release(claimed.reference_id, claimed.reference.decode, claimed.params, services)


def release(pin_id: int, decode: str, params: dict[str, Any], services: Services) -> None:
    """Have D free a pin's blocks, by way of whichever prefill node is usable then."""
    if services.fleet.engine(decode).frees_on_release is False:
        services.pins.move(pin_id, PinState.STUCK)
        return

    def done(is_free: bool) -> None:
        if is_free:
            services.pins.gone(pin_id)
        else:
            services.pins.move(pin_id, PinState.STUCK)

    services.pins.move(pin_id, PinState.LEAVING)
    services.releases.soon(lambda: usable_url(services.fleet.prefills), params, done)


def release_prefilled(params: dict[str, Any] | None, services: Services) -> None:
    """Have P free the blocks that no D will read; the consumer of P's blocks is a D."""
    if params is not None:
        services.releases.soon(lambda: usable_url(services.fleet.decodes), params)


def usable_url(engines: Iterable[Engine]) -> str | None:
    """The first usable engine, if any."""
    return next((engine.url for engine in engines if engine.usable), None)
