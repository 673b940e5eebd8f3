"""What counts as the same distribution."""

import json

import pytest

from kvloop.turn.canary import divergence, first_token_logprobs
from kvloop.turn.request import Api


def test_noise_is_small_and_another_best_token_is_not() -> None:
    cold = {"a": -0.3, "b": -1.5, "c": -4.0}
    assert divergence({"a": -0.32, "b": -1.4, "d": -4.1}, cold) == pytest.approx(0.02)
    # Two nearly equal ones may change places.
    assert divergence({"a": -0.7, "b": -0.69}, {"a": -0.69, "b": -0.7}) == pytest.approx(0.01)
    assert divergence({"b": -0.1, "a": -3.0}, cold) == pytest.approx(2.7)
    assert divergence({"x": -0.1}, cold) == float("inf")


def test_nothing_to_compare_is_not_agreement() -> None:
    with pytest.raises(ValueError, match="no log-prob"):
        divergence({}, {"a": 0.0})


def test_both_apis_say_it_in_their_own_way() -> None:
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -2}]
    chat = {"choices": [{"logprobs": {"content": [{"token": "a", "top_logprobs": top}]}}]}
    assert first_token_logprobs(Api.CHAT, json.dumps(chat).encode()) == {"a": -0.5, "b": -2.0}
    text = {"choices": [{"logprobs": {"top_logprobs": [{"a": -0.5, "b": -2.0}]}}]}
    assert first_token_logprobs(Api.COMPLETIONS, json.dumps(text).encode()) == {
        "a": -0.5,
        "b": -2.0,
    }


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": [{"logprobs": null}]}'])
def test_an_answer_without_them_is_an_error(body: bytes) -> None:
    for api in Api:
        with pytest.raises(ValueError, match="no log-prob"):
            first_token_logprobs(api, body)
