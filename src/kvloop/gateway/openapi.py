"""What clients may send and what they get, as an OpenAPI document: of this router, not of vLLM.

Paths, methods, headers and errors are those of the code. Fields that only engines look at are not
listed: they are passed on, and engines say what is wrong with them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvloop import __version__
from kvloop.gateway.errors import ERROR_TYPES
from kvloop.gateway.front import REQUEST_ID_HEADER
from kvloop.gateway.identity import CONVERSATION_HEADERS
from kvloop.gateway.status import raw_json_response
from kvloop.gateway.turns import REUSE_HEADER, REUSE_WISHES, ROUTE_HEADER
from kvloop.proof.fingerprint import MAX_TOKEN_ID
from kvloop.turn.request import Api

if TYPE_CHECKING:
    from aiohttp import web

_WHENEVER: Final = (400, 408, 415, 417, 431, 500)
"""What any request can get: the HTTP itself is wrong, or the router is."""
_TURN_ERRORS: Final = (*_WHENEVER, 401, 413, 429, 502, 503, 504)
_TOKEN_ID: Final = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_INTEGER: Final = {"type": ["integer", "null"]}
_TEXT: Final = {"type": ["string", "null"]}

_COMMON_FIELDS: Final[dict[str, Any]] = {
    "model": {**_TEXT, "description": "Model or adapter, as GET /v1/models lists them."},
    "stream": {"type": "boolean", "default": False},
    "n": _INTEGER,
    "best_of": _INTEGER,
    "conversation_id": {**_TEXT, "description": "Narrows the search for the history's KV."},
    "prompt_cache_key": {**_TEXT, "description": "Read like conversation_id."},
}
_FIELDS: Final[dict[Api, dict[str, Any]]] = {
    Api.CHAT: {
        "type": "object",
        "required": ["messages"],
        "properties": {
            **_COMMON_FIELDS,
            "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        },
    },
    Api.COMPLETIONS: {
        "type": "object",
        "required": ["prompt"],
        "properties": {
            **_COMMON_FIELDS,
            "prompt": {
                "oneOf": [
                    {"type": "string"},
                    {"type": "array", "items": _TOKEN_ID},
                    {"type": "array", "items": {"type": "string"}},
                ]
            },
        },
    },
}


async def serve(_: web.Request) -> web.Response:
    """GET /openapi.json."""
    return raw_json_response(_encoded())


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The document, as plain data."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvloop",
            "version": __version__,
            "description": "A router for disaggregated vLLM. Where API keys are set up, /v1 asks "
            "for one.",
        },
        "paths": {
            **{api.value: {"post": _turn(api)} for api in Api},
            "/v1/models": {"get": _get("The decode nodes' models.", "Models", errors=(401,))},
            "/health": {"get": _get("The process is up.", "Health")},
            "/ready": {"get": _get("Whether turns can be served.", "Ready", also=(503,))},
            "/openapi.json": {"get": _get("This document.", "AnyObject")},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _turn(api: Api) -> dict[str, Any]:
    headers = [
        {
            "name": REUSE_HEADER,
            "in": "header",
            "description": "off: this turn without reuse. last: no turn follows this one.",
            "schema": {"type": "string", "enum": list(REUSE_WISHES)},
        },
        *(
            {"name": name, "in": "header", "schema": {"type": "string"}}
            for name in (*CONVERSATION_HEADERS, REQUEST_ID_HEADER)
        ),
    ]
    answer = {
        "description": "The decode node's answer.",
        "headers": {**_request_id(), ROUTE_HEADER: {"schema": {"type": "string"}}},
        "content": {
            "application/json": {"schema": _schema("AnyObject")},
            "text/event-stream": {},
        },
    }
    return {
        "operationId": api.label,
        "summary": "One turn. Fields that are not listed reach the engines as they are.",
        "security": [{}, {"bearer": []}, {"key": []}],
        "parameters": headers,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _schema(f"{api.label.title()}Request")}},
        },
        "responses": {
            "200": answer,
            **_errors(_TURN_ERRORS),
            "default": {
                "description": "An engine's own error, as the engine put it.",
                "headers": _request_id(),
                "content": {"application/json": {"schema": _schema("AnyObject")}},
            },
        },
    }


def _get(
    summary: str, schema: str, *, also: tuple[int, ...] = (), errors: tuple[int, ...] = ()
) -> dict[str, Any]:
    """A read-only endpoint; ``also``: further statuses with the same body."""
    found = {
        "description": summary,
        "headers": _request_id(),
        "content": {"application/json": {"schema": _schema(schema)}},
    }
    secured: dict[str, Any] = (
        {"security": [{}, {"bearer": []}, {"key": []}]} if 401 in errors else {}
    )
    responses = {str(status): found for status in (200, *also)}
    return {
        "summary": summary,
        **secured,
        "responses": {**responses, **_errors((*_WHENEVER, *errors))},
    }


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {
        str(status): {
            "description": ERROR_TYPES[status],
            "headers": _request_id(),
            "content": {"application/json": {"schema": _schema("Error")}},
        }
        for status in statuses
    }


def _request_id() -> dict[str, Any]:
    return {REQUEST_ID_HEADER: {"schema": {"type": "string"}}}


def _schema(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas() -> dict[str, Any]:
    strings = {"type": "array", "items": {"type": "string"}}
    return {
        **{f"{api.label.title()}Request": _FIELDS[api] for api in Api},
        "AnyObject": {"type": "object"},
        "Health": _object(status={"const": "ok"}),
        "Ready": _object(ready={"type": "boolean"}, missing=strings),
        "Models": _object(
            object={"const": "list"}, data={"type": "array", "items": {"type": "object"}}
        ),
        "Error": _object(
            error=_object(
                message={"type": "string"},
                type={"type": "string"},
                param={"type": ["string", "null"]},
                code={"type": "integer"},
            )
        ),
    }


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}
