"""Bodies of the two legs: everything of the client's, but what a leg must own."""

import json
from typing import Any

from kvloop.turn.bodies import PromptIds, decode_body, prefill_body
from kvloop.turn.request import Api, TurnRequest, read_request

FIELDS = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0.3,
    "seed": 7,
    "stop": ["\n"],
    "max_completion_tokens": 99,
    "max_tokens": 98,
    "min_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 3,
    "n": 1,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "cache_salt": "s",
    "a_vendor_field": [1, {"deep": None}],
}
PROMPT = PromptIds([5, 6, 7])
PREFILLED = {"do_remote_prefill": True, "remote_block_ids": [[1]], "an_unknown_field": 1}


def turn(**changes: Any) -> TurnRequest:
    return read_request(Api.CHAT, json.dumps({**FIELDS, **changes}).encode(), request_id="r")


def completion(**fields: Any) -> TurnRequest:
    body = json.dumps({"model": "m", "prompt": "Hi", **fields}).encode()
    return read_request(Api.COMPLETIONS, body, request_id="r")


def test_p_computes_one_unseen_token_of_the_same_prompt() -> None:
    body = json.loads(prefill_body(turn(), PROMPT, None))
    assert (body["max_tokens"], body["max_completion_tokens"], body["stream"]) == (1, 1, False)
    assert not body.keys() & {"min_tokens", "stop", "logprobs", "top_logprobs", "stream_options"}
    untouched = (
        "model",
        "messages",
        "temperature",
        "seed",
        "cache_salt",
        "a_vendor_field",
        "tools",
    )
    assert {name: body[name] for name in untouched} == {name: FIELDS[name] for name in untouched}
    assert body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "prompt_token_ids": [5, 6, 7],
    }


def test_what_constrains_the_answer_does_not_cost_p_when_the_prompt_is_given_as_ids() -> None:
    with_ids = json.loads(prefill_body(turn(), PROMPT, None))
    assert with_ids["tool_choice"] == "none"
    assert "response_format" not in with_ids
    without_ids = json.loads(prefill_body(turn(), None, None))
    assert without_ids["tool_choice"] == "required"
    assert "response_format" in without_ids


def test_an_attached_reference_goes_to_p_whole() -> None:
    reference = {"do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": 64}
    body = json.loads(prefill_body(turn(), PROMPT, {**reference, "an_unknown_field": [1]}))
    assert body["kv_transfer_params"] == {
        **reference,
        "an_unknown_field": [1],
        "prompt_token_ids": [5, 6, 7],
    }


def test_k20_d_gets_the_clients_fields_and_p_params_as_they_came() -> None:
    body = json.loads(decode_body(turn(), PROMPT, PREFILLED))
    params = body.pop("kv_transfer_params")
    assert body == FIELDS
    assert params == {**PREFILLED, "prompt_token_ids": [5, 6, 7], "kvloop_stream_reference": True}


def test_a_whole_answer_is_asked_for_its_token_ids_instead() -> None:
    body = json.loads(decode_body(turn(stream=False), PROMPT, PREFILLED))
    assert body["return_token_ids"] is True
    assert "kvloop_stream_reference" not in body["kv_transfer_params"]


def test_d_alone_gets_no_params_at_all() -> None:
    body = json.loads(decode_body(turn(), None, None))
    assert body == FIELDS


def test_completions_carry_the_ids_as_their_prompt() -> None:
    for body in (
        prefill_body(completion(), PROMPT, None),
        decode_body(completion(), PROMPT, PREFILLED),
    ):
        assert json.loads(body)["prompt"] == [5, 6, 7]
        assert "prompt_token_ids" not in json.loads(body)["kv_transfer_params"]
