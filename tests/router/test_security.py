"""Keys, privacy, admission: who is let in, what engines and logs get to see, where we connect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import web

from kvloop.config import Settings
from kvloop.engines.client import EngineClient
from kvloop.gateway.app import Router
from kvloop.gateway.keys import KeyFileError, add_key, revoke_keys
from kvloop.turn.answer_stream import AnswerStream
from kvloop.turn.request import TurnRequest
from kvloop.turn.runner import TurnRunner
from tests.double.http import until
from tests.fuzz.raw import exchange
from tests.router.stack import Stack, follow, opening, stack

CHAT = "/v1/chat/completions"
SECRET_PROMPT = "Xylophone-4711 is what nobody may read in a log."


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def keyed(folder: Path, **settings: Any) -> AsyncIterator[tuple[Stack, str, Path]]:
    """A stack that asks for keys, a key of the tenant `ann`, and the file."""
    file = folder / "keys"
    key = add_key(file, "ann")
    async with stack(settings={"api_keys": str(file), **settings}) as s:
        yield s, key, file


# --- API keys -----------------------------------------------------------------------------------


async def test_without_a_known_key_nothing_under_v1_is_served(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (s, key, _):
        for headers in ({}, bearer("kvl-wrong"), bearer(""), {"authorization": f"Basic {key}"}):
            answer = await s.post(CHAT, {"model": "double", "messages": opening()}, headers)
            assert answer.status == 401
            assert json.loads(answer.body)["error"]["type"] == "AuthenticationError"
            assert answer.headers["www-authenticate"] == "Bearer"
            async with s.http.get(f"{s.url}/v1/models", headers=headers) as response:
                assert response.status == 401
        assert s.prefill.calls[-1].path == "/v1/completions/render"  # the monitor's, not a turn's
        for path in ("/health", "/ready", "/openapi.json"):
            async with s.http.get(s.url + path) as response:
                assert response.status == 200


async def test_a_known_key_opens_in_either_header(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (s, key, _):
        assert (await s.chat(opening(), headers=bearer(key))).status == 200
        assert (await s.chat(opening(), headers={"x-api-key": key})).status == 200


async def test_keys_of_one_tenant_share_history_and_other_tenants_do_not(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (s, key, file):
        second, other = add_key(file, "ann"), add_key(file, "bob")
        s.router.reload_keys()
        messages = opening()
        first = await s.chat(messages, headers=bearer(key))
        more = follow(messages, first.text)
        assert (await s.chat(more, headers=bearer(other))).route == "recompute"
        assert (await s.chat(more, headers=bearer(second))).route == "pull"


async def test_a_clients_key_stays_here_and_engines_get_their_own(tmp_path: Path) -> None:
    async with keyed(tmp_path, engine_api_key="engines-own") as (s, key, _):
        await s.chat(opening(), headers={**bearer(key), "x-api-key": key})
        for engine in (s.prefill, s.decode):
            for call in engine.requests:
                assert call.headers["authorization"] == "Bearer engines-own"
                assert key not in str(call)


async def test_without_an_engine_key_engines_get_none(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (s, key, _):
        await s.chat(opening(), headers=bearer(key))
        assert "authorization" not in s.decode.requests[0].headers


async def test_without_a_key_file_credentials_pass_to_the_engines() -> None:
    async with stack() as s:
        await s.chat(opening(), headers=bearer("the engines know it"))
        assert s.decode.requests[0].headers["authorization"] == "Bearer the engines know it"


async def test_keys_follow_the_file(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (s, key, file):
        new = add_key(file, "bob")
        s.fabric.now_s += 1.5
        assert (await s.chat(opening(), headers=bearer(new))).status == 200
        revoke_keys(file, "ann")
        s.fabric.now_s += 1.5
        assert (await s.post(CHAT, {}, bearer(key))).status == 401
        assert (await s.chat(opening(), headers=bearer(new))).status == 200


async def test_a_key_file_that_breaks_locks_nobody_out_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed(tmp_path) as (s, key, file):
        file.write_text(f"{key}\n")  # somebody pasted the key itself
        s.router.reload_keys()
        assert (await s.chat(opening(), headers=bearer(key))).status == 200
        assert "line 1" in caplog.text
        assert key not in caplog.text


def test_a_router_does_not_start_on_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot read"):
        Router(Settings(api_keys=str(tmp_path / "none")))


# --- what is written down -----------------------------------------------------------------------


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Every logger there is, at debug level."""
    caplog.set_level(logging.DEBUG)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("kvloop", "aiohttp", "asyncio")):
            caplog.set_level(logging.DEBUG, logger=name)
    return caplog


def trip_and_quote(_: TurnRunner, request: TurnRequest) -> NoReturn:
    """A defect as bad as can be: its message holds all that is secret."""
    raise ValueError(f"cannot digest {request.body} of {request.engine_headers}")


async def test_neither_prompts_nor_keys_are_logged_counted_or_echoed(
    tmp_path: Path, everything_logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keyed(tmp_path, engine_api_key="engines-own") as (s, key, _):
        messages = opening(SECRET_PROMPT)
        first = await s.chat(messages, headers=bearer(key))
        more = follow(messages, first.text)
        assert (await s.chat(more, headers=bearer(key))).route == "pull"

        turn = {"model": "double", "messages": messages}
        answers = [
            await s.post(CHAT, {**turn, "model": 5}, bearer(key)),
            await s.post(CHAT, {**turn, "model": "nope"}, bearer(key)),
            await s.post(CHAT, json.dumps(turn).encode()[:-1], bearer(key)),
            await s.post(CHAT, turn, bearer(key + "x")),
            await s.post(CHAT, turn, {"authorization": key}),
            await s.post("/v1/nothing", turn, bearer(key)),
        ]
        s.decode.break_stream_after = 3
        answers.append(await s.post(CHAT, {**turn, "stream": True}, bearer(key)))
        s.decode.break_stream_after = None
        s.prefill.break_next = 2
        answers.append(await s.post(CHAT, turn, bearer(key)))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nBad Header {key}: {SECRET_PROMPT}\r\n\r\n"
        (malformed,) = await exchange(s.url, head.encode())
        assert [answer.status for answer in answers] == [400, 404, 400, 401, 401, 404, 200, 502]
        assert malformed.status == 400

        monkeypatch.setattr(TurnRunner, "serve", trip_and_quote)
        failed = await s.post(CHAT, turn, bearer(key))
        assert failed.status == 500
        error = json.loads(failed.body)["error"]
        assert failed.headers["x-request-id"] in error["message"]
        assert failed.headers["x-request-id"] in everything_logged.text
        assert "ValueError" in everything_logged.text

        async with s.http.get(f"{s.admin_url}/metrics") as response:
            metrics = await response.text()
        assert "kvloop_unhandled_errors_total 1.0" in metrics
        written = everything_logged.text + metrics + str(malformed)
        written += "".join(str(answer) for answer in (*answers, failed))
        for secret in (key, key[4:], "engines-own", SECRET_PROMPT, "Xylophone"):
            assert secret not in written, secret
        assert first.text[:20] not in everything_logged.text


async def test_an_error_after_the_answer_has_begun_cuts_it_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack() as s:
        fed = AnswerStream.feed

        def feed(stream: AnswerStream, data: bytes) -> bytes:
            if b"[DONE]" in data:
                raise ValueError(SECRET_PROMPT)
            return fed(stream, data)

        monkeypatch.setattr(AnswerStream, "feed", feed)
        body = json.dumps({"model": "double", "messages": opening(), "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        (reply,) = await exchange(s.url, head.encode() + body)
        assert reply.status == 200
        assert not reply.body.endswith(b"0\r\n\r\n")  # the client can tell
        assert SECRET_PROMPT not in caplog.text
        assert "ValueError" in caplog.text


# --- where the router connects ------------------------------------------------------------------


class _Recorder:
    """An engine client that notes every URL and passes the calls on."""

    def __init__(self, inner: EngineClient) -> None:
        self._inner = inner
        self.urls: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> _Recorder:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._inner.__aexit__(*error)

    def post(self, url: str, *rest: Any, **named: Any) -> Any:
        self.urls.add(url)
        return self._inner.post(url, *rest, **named)

    def stream(self, url: str, *rest: Any, **named: Any) -> Any:
        self.urls.add(url)
        return self._inner.stream(url, *rest, **named)


STEERING_HEADERS = (
    "host",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-original-url",
    "x-rewrite-url",
    "x-prefill-url",
    "x-prefiller-host-port",
    "x-remote-host",
    "proxy-authorization",
    "kv-transfer-params",
    "referer",
)


@pytest.mark.parametrize("streamed", [True, False])
async def test_no_field_or_header_of_a_client_changes_where_the_router_connects(
    streamed: bool,
) -> None:
    visits: list[str] = []

    async def note(request: web.BaseRequest) -> web.Response:
        visits.append(request.path)
        return web.json_response({})

    trap = web.ServerRunner(web.Server(note))
    await trap.setup()
    await web.TCPSite(trap, "127.0.0.1", 0).start()
    host, port = trap.addresses[0][:2]
    elsewhere = f"http://{host}:{port}"
    evil = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "evil",
        "remote_request_id": "evil",
        "remote_host": host,
        "remote_port": port,
        "remote_block_ids": [[1, 2, 3]],
        "remote_num_tokens": 48,
        "remote_url": elsewhere,
        "tp_size": 1,
    }
    fields: dict[str, Any] = {
        "kv_transfer_params": evil,
        "vllm_xargs": {"kv_transfer_params": evil, "deep": {"kv_transfer_params": evil}},
        "extra_body": {"kv_transfer_params": evil},
        "extra_args": {"kv_transfer_params": evil},
        "metadata": {"kv_transfer_params": json.dumps(evil)},
        "remote_host": host,
        "remote_port": port,
        "prefill": elsewhere,
        "decode": elsewhere,
        "url": elsewhere,
        "base_url": elsewhere,
        "callback_url": elsewhere,
        "conversation_id": elsewhere,
        "prompt_cache_key": elsewhere,
        "user": elsewhere,
    }
    headers = dict.fromkeys(STEERING_HEADERS, elsewhere)
    headers |= {"connection": "x-session-id, authorization", "te": "trailers", "upgrade": "h2c"}
    headers |= {"x-session-id": elsewhere, "x-conversation-id": elsewhere}
    headers |= {"traceparent": elsewhere, "x-request-id": elsewhere}
    async with stack() as s:
        client = s.router.services.client
        recorder = _Recorder(client)
        object.__setattr__(s.router.services, "client", recorder)
        messages = opening()
        first = await s.chat(messages, headers=headers, stream=streamed, **fields)
        more = follow(messages, first.text)
        more[-1]["kv_transfer_params"] = evil
        second = await s.chat(more, headers=headers, right=False, stream=streamed, **fields)
        assert second.status == 200
        assert recorder.urls == {engine.url for engine in s.router.services.fleet.engines}
        for engine in (s.prefill, s.decode):
            for call in engine.requests:
                assert "evil" not in str(call.body["kv_transfer_params"])
                assert str(port) not in str(call.body["kv_transfer_params"])
                assert "kv_transfer_params" not in call.body["vllm_xargs"]
                assert not {"forwarded", "x-forwarded-for", "upgrade", "te"} & set(call.headers)
    assert visits == []
    await trap.cleanup()


async def test_an_engine_that_redirects_is_not_followed() -> None:
    visits: list[str] = []

    async def note(request: web.BaseRequest) -> web.Response:
        visits.append(request.path)
        return web.json_response({})

    trap = web.ServerRunner(web.Server(note))
    await trap.setup()
    await web.TCPSite(trap, "127.0.0.1", 0).start()
    async with stack() as s:
        host, port = trap.addresses[0][:2]

        async def redirect(*_: Any) -> Any:
            raise web.HTTPTemporaryRedirect(f"http://{host}:{port}/v1/chat/completions")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.double.turns.answer", redirect)
            answer = await s.post(CHAT, {"model": "double", "messages": opening()})
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["code"] == 502
        assert "location" not in answer.headers
    assert visits == []
    await trap.cleanup()


# --- admission ----------------------------------------------------------------------------------


async def test_more_turns_than_may_run_are_told_to_come_back_before_their_body_is_read() -> None:
    async with stack(settings={"max_turns": 1}) as s:
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(opening()))
        await until(lambda: len(s.prefill.requests) == 1)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
        (reply,) = await exchange(s.url, head.encode())  # of the body nothing is sent
        assert reply.error["code"] == 429
        assert reply.headers["retry-after"]
        s.prefill.hold.set()
        assert (await turn).status == 200
        assert (await s.chat(opening())).status == 200


async def test_one_tenants_turns_do_not_take_the_places_of_others(tmp_path: Path) -> None:
    async with keyed(tmp_path, max_turns_per_tenant=1) as (s, key, file):
        other = add_key(file, "bob")
        s.router.reload_keys()
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(opening(), headers=bearer(key)))
        await until(lambda: len(s.prefill.requests) == 1)
        again = await s.post(CHAT, {"messages": opening()}, bearer(key))
        assert (again.status, again.headers["retry-after"]) == (429, "1")
        others = asyncio.create_task(s.chat(opening(), headers=bearer(other)))
        await until(lambda: len(s.prefill.requests) == 2)
        s.prefill.hold.set()
        assert [(await one).status for one in (turn, others)] == [200, 200]


# --- two listeners ------------------------------------------------------------------------------


async def test_clients_see_no_engine_and_no_metric() -> None:
    async with stack() as s:
        for path in ("/metrics", "/engines", "/ready", "/health", "/openapi.json", "/v1/models"):
            async with s.http.get(s.url + path) as response:
                text = await response.text()
                assert (response.status == 404) == (path in ("/metrics", "/engines"))
            for engine in s.router.services.fleet.engines:
                assert engine.url not in text
                assert engine.url.rpartition(":")[2] not in text


async def test_operators_see_engines_and_cannot_run_turns() -> None:
    async with stack() as s:
        async with s.http.get(f"{s.admin_url}/engines") as response:
            engines = (await response.json())["engines"]
        assert {engine["url"] for engine in engines} == {
            engine.url for engine in s.router.services.fleet.engines
        }
        assert {engine["breaker"] for engine in engines} == {"closed"}
        async with s.http.post(s.admin_url + CHAT, json={"messages": opening()}) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == 404


async def test_the_operators_listener_can_be_switched_off() -> None:
    async with stack(settings={"admin_host": ""}) as s:
        assert s.admin_url == ""
        assert (await s.chat(opening())).status == 200
