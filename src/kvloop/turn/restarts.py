"""When an engine is another one than before, at the same address."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvloop.ledger.reference import same_life
from kvloop.turn.releasing import release_claimed

if TYPE_CHECKING:
    from kvloop.engines.fleet import Engine
    from kvloop.turn.services import Services

logger = logging.getLogger("kvloop.turn")


def forget_earlier_life(engine: Engine, engine_id: str | None, services: Services) -> None:
    """Drop what an engine held before it was restarted.

    ``engine_id``: its id now, if known: what was filed under it stays.
    """
    dropped = services.ledger.drop_engine(engine.url, keep_engine_id=engine_id)
    services.pins.restarted(engine.url, engine_id)
    services.pairs.restarted(engine.url)
    services.canary.restarted(engine.url)
    if dropped:
        logger.warning("%d references died with %s", len(dropped), engine.url)
    if engine_id is None and engine.has_new_id:
        # Some may be of the new life: a reference told us of the restart before a probe did.
        release_claimed(dropped, "restarted", services)
    engine.has_new_id = False


def note_engine_id(decode: Engine, engine_id: str, services: Services) -> None:
    """A reference says which engine it is from: a new id is a restart that no probe has seen."""
    if decode.engine_id is not None and not same_life(decode.engine_id, engine_id):
        logger.warning("decode node %s was restarted: its engine id has changed", decode.url)
        forget_earlier_life(decode, engine_id, services)
        decode.has_new_id = True
    decode.engine_id = engine_id
