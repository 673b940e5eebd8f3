"""What operators may change, on the admin listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvloop.gateway.errors import error_response
from kvloop.gateway.status import json_response

if TYPE_CHECKING:
    from aiohttp import web

    from kvloop.engines.pairs import Pairs


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    prefill: str
    decode: str


class Operators:
    """Handlers that change the router's state."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    async def reset_pair(self, request: web.Request) -> web.Response:
        """Let a pair of engines pull again that the canary or failed pulls have switched off."""
        try:
            pair = msgspec.json.decode(await request.read(), type=_Pair)
        except msgspec.MsgspecError as error:
            return error_response(
                400, f'The body must be {{"prefill": URL, "decode": URL}}: {error}.'
            )
        was_noted = self._pairs.reset(pair.prefill, pair.decode)
        return json_response({"prefill": pair.prefill, "decode": pair.decode, "reset": was_noted})
