"""Who asks, and in which conversation: read from headers, trusted as far as each deserves."""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

CONVERSATION_HEADERS: Final = ("x-session-id", "x-conversation-id")
_PASSED_TO_ENGINES: Final = ("authorization", "traceparent", "tracestate")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_CONVERSATION_CHARS: Final = 256


def tenant_of(headers: Mapping[str, str]) -> str:
    """Different credentials are different tenants; the credential itself is not kept."""
    credential = headers.get("authorization") or headers.get("x-api-key") or ""
    return hashlib.sha256(credential.encode()).hexdigest() if credential else ""


def conversation_of(headers: Mapping[str, str]) -> str | None:
    """The client's own id of the conversation, if it sends one."""
    for name in CONVERSATION_HEADERS:
        value = headers.get(name)
        if value:
            return value[:_MAX_CONVERSATION_CHARS]
    return None


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's request id if it can go into a log line as it is, else a new one."""
    own = headers.get("x-request-id", "")
    return own if _REQUEST_ID.fullmatch(own) else uuid.uuid4().hex


def engine_headers(headers: Mapping[str, str], request_id: str) -> dict[str, str]:
    """What engines get of a client's headers: nothing that steers them."""
    passed = {name: headers[name] for name in _PASSED_TO_ENGINES if name in headers}
    passed["x-request-id"] = request_id
    return passed
