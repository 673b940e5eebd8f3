"""Every pin that a decode node tells us of goes into the account, whoever asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvloop.turn.restarts import note_engine_id
from kvloop.wire import REMOTE_ENGINE_ID, REMOTE_EXPIRY_TIME, REMOTE_NUM_TOKENS

if TYPE_CHECKING:
    from kvloop.engines.fleet import Engine
    from kvloop.turn.services import Services


class AccountedPin(NamedTuple):
    """What D pins by one answer."""

    pin_id: int
    engine_id: str
    num_tokens: int
    """Of whole blocks."""
    deadline_s: float
    """When the reference lapses for us, on our clock."""


def account_pin(params: dict[str, Any], decode: Engine, services: Services) -> AccountedPin:
    """Enter the pin that D's reference ``params`` tells of; may tell of a restart as well."""
    engine_id = str(params.get(REMOTE_ENGINE_ID))
    expiry_s = params.get(REMOTE_EXPIRY_TIME)
    deadline_s = services.deadlines.deadline_s(engine_id, expiry_s, services.clock())
    if params.get(REMOTE_ENGINE_ID):
        note_engine_id(decode, engine_id, services)
    said = params.get(REMOTE_NUM_TOKENS)
    block_size = decode.facts.block_size if decode.facts is not None else 1
    num_blocks = -(-said // block_size) if isinstance(said, int) else 0
    pin = AccountedPin(services.ledger.next_id(), engine_id, num_blocks * block_size, deadline_s)
    ends_s = deadline_s + services.deadlines.margin_s
    services.pins.pinned(pin.pin_id, decode.url, engine_id, pin.num_tokens, ends_s)
    return pin
