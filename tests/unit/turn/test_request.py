"""Requests: what the loop must know is read, what no client may say is dropped."""

import json
from typing import Any

import pytest

from kvloop.turn.request import Api, BadRequestError, TurnRequest, read_request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def chat(**fields: Any) -> TurnRequest:
    return read_request(Api.CHAT, json.dumps({**CHAT, **fields}).encode(), request_id="r")


def completion(**fields: Any) -> TurnRequest:
    body = {"model": "m", "prompt": "Hi", **fields}
    return read_request(Api.COMPLETIONS, json.dumps(body).encode(), request_id="r")


def test_k19_clients_cannot_send_kv_transfer_params() -> None:
    sent = chat(
        kv_transfer_params={"do_remote_prefill": True},
        vllm_xargs={"kv_transfer_params": "kills the engine", "other": 1},
    )
    assert "kv_transfer_params" not in json.dumps(sent.body)
    assert sent.body["vllm_xargs"] == {"other": 1}


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"\xff", None),
        (b'"text"', None),
        (b"[" * 100_000, None),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "Hi"}', "messages"),
        (b'{"messages": [1]}', "messages"),
        (json.dumps({**CHAT, "model": 3}).encode(), "model"),
        (json.dumps({**CHAT, "n": "2"}).encode(), "n"),
    ],
)
def test_bodies_that_cannot_be_understood_are_refused(data: bytes, param: str | None) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_request(Api.CHAT, data, request_id="r")
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (chat(n=2), "several_sequences"),
        (chat(use_beam_search=True), "beam_search"),
        (chat(prompt_logprobs=1), "prompt_logprobs"),
        (completion(best_of=3), "several_sequences"),
        (completion(prompt=["one", "two"]), "several_prompts"),
        (completion(prompt=[[1, 2], [3]]), "several_prompts"),
        (completion(prompt=[]), "several_prompts"),
        (completion(echo=True), "echo"),
        (completion(prompt=["one"]), None),
        (completion(prompt=[1, 2, 3]), None),
        (chat(n=1), None),
        (chat(n=None), None),
    ],
)
def test_k17_prompts_that_p_and_d_cannot_share_are_known(
    request_: TurnRequest, reason: str | None
) -> None:
    assert request_.without_prefill == reason


def test_k21_media_are_not_reused() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    assert chat(messages=[image]).without_reuse == "media"
    text = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert chat(messages=[text]).without_reuse is None


@pytest.mark.parametrize("field", ["conversation_id", "prompt_cache_key"])
def test_a_conversation_id_in_the_body_is_a_hint(field: str) -> None:
    assert chat(**{field: "c1"}).conversation == "c1"
    assert chat(**{field: 5}).conversation is None
