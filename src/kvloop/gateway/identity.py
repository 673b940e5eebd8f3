"""Who asks, and in which conversation: read from headers, trusted as far as each deserves."""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvloop.gateway.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvloop.gateway.keys import KeyFile

CONVERSATION_HEADERS: Final = ("x-session-id", "x-conversation-id")
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PRINTABLE: Final = re.compile(r"[\x20-\x7e]+")
_MAX_CONVERSATION_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from."""

    tenant: str
    authorization: str | None
    """The header that engines get."""


class Callers:
    """Tells callers apart."""

    def __init__(self, keys: KeyFile | None, engine_api_key: str) -> None:
        """``keys``: None asks for none. ``engine_api_key``: sent to engines in place of a client's
        own; empty: none."""
        self._keys = keys
        self._engine_authorization = f"Bearer {engine_api_key}" if engine_api_key else None

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Raises RefusedError (401) where a key is asked for and none of ours is given."""
        if self._keys is None:
            own = headers.get("authorization")
            passed = own if own and _PRINTABLE.fullmatch(own) else None
            return Caller(_tenant_by_credential(headers), self._engine_authorization or passed)
        key = _key_in(headers)
        tenant = self._keys.tenant_of(key) if key else None
        if tenant is None:
            what = "This API key is not known." if key else "An API key is missing."
            raise RefusedError(
                401,
                f"{what} Send `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                {"www-authenticate": "Bearer"},
            )
        return Caller(tenant, self._engine_authorization)


def _key_in(headers: Mapping[str, str]) -> str | None:
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key")
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _tenant_by_credential(headers: Mapping[str, str]) -> str:
    """Different credentials are different tenants; the credential itself is not kept."""
    credential = headers.get("authorization") or headers.get("x-api-key") or ""
    data = credential.encode("utf-8", "surrogateescape")
    return hashlib.sha256(data).hexdigest() if data else ""


def conversation_of(headers: Mapping[str, str]) -> str | None:
    """The client's own id of the conversation, if it sends one."""
    for name in CONVERSATION_HEADERS:
        value = headers.get(name)
        if value:
            readable = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return readable[:_MAX_CONVERSATION_CHARS]
    return None


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's request id if it can go into a log line as it is, else a new one."""
    own = headers.get("x-request-id", "")
    return own if _REQUEST_ID.fullmatch(own) else uuid.uuid4().hex


def engine_headers(
    headers: Mapping[str, str], request_id: str, authorization: str | None
) -> dict[str, str]:
    """What engines get with a turn: nothing of the client's that steers them."""
    passed = {
        name: headers[name]
        for name in _TRACE_HEADERS
        if name in headers and _PRINTABLE.fullmatch(headers[name])
    }
    if authorization is not None:
        passed["authorization"] = authorization
    passed["x-request-id"] = request_id
    return passed
