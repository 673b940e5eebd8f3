"""D's answer on its way: the reference is taken out, every other byte stays."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.turn.answer_stream import NOTHING_SAID, AnswerStream, take_from_body

DONE = b"data: [DONE]\n\n"


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"object": "chat.completion.chunk", **fields}).encode() + b"\n\n"


def reference_event(params: dict[str, Any] | None = None) -> bytes:
    event = {
        "object": "kvloop.stream_reference",
        "kv_transfer_params": params,
        "token_ids": [3, 1, 4],
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


TRICKY = [
    'say "kv_transfer_params": null',
    "kvloop.stream_reference",
    '"kvloop.stream_reference"',
    '{"object":"kvloop.stream_reference","kv_transfer_params":{}}',
    "line\nbreaks\n\nin it",
]


@given(
    texts=st.lists(st.one_of(st.text(max_size=30), st.sampled_from(TRICKY)), max_size=8),
    cuts=st.lists(st.integers(0, 5000), max_size=15),
)
def test_the_plugin_event_is_taken_out_whole_however_the_stream_is_cut(
    texts: list[str], cuts: list[int]
) -> None:
    before = b"".join(chunk(choices=[{"delta": {"content": text}}]) for text in texts)
    data = before + reference_event({"remote_num_tokens": 5}) + DONE
    marks = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    stream = AnswerStream()
    out = b"".join(
        stream.feed(data[start:end]) for start, end in zip(marks, marks[1:], strict=False)
    )
    assert out + stream.finish() == before + DONE
    assert stream.end.params == {"remote_num_tokens": 5}
    assert stream.end.token_ids == [3, 1, 4]


@pytest.mark.parametrize("text", TRICKY)
def test_an_answer_that_talks_about_references_is_not_touched(text: str) -> None:
    event = chunk(choices=[{"delta": {"content": text}}])
    stream = AnswerStream()
    assert stream.feed(event) == event
    assert stream.end is NOTHING_SAID


def test_k30_a_native_reference_is_taken_out_of_its_event_and_the_rest_stays() -> None:
    choices = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    stream = AnswerStream()
    out = stream.feed(chunk(choices=choices, kv_transfer_params={"remote_num_tokens": 5}))
    assert json.loads(out.removeprefix(b"data: ")) == {
        "object": "chat.completion.chunk",
        "choices": choices,
    }
    assert stream.end.params == {"remote_num_tokens": 5}


def test_native_reference_and_plugin_ids_come_together() -> None:
    stream = AnswerStream()
    stream.feed(chunk(choices=[], kv_transfer_params={"remote_num_tokens": 5}))
    stream.feed(b'data: {"object":"kvloop.stream_reference","token_ids":[1,2]}\n\n')
    assert (stream.end.params, stream.end.token_ids) == ({"remote_num_tokens": 5}, [1, 2])


def test_an_answer_whose_blocks_were_not_kept_says_so() -> None:
    stream = AnswerStream()
    stream.feed(reference_event(None))
    assert stream.end is not NOTHING_SAID
    assert stream.end.params is None


def test_a_stream_cut_off_within_an_event_passes_what_there_is() -> None:
    stream = AnswerStream()
    assert stream.feed(b"data: {") + stream.finish() == b"data: {"


WHOLE = {
    "id": "x",
    "choices": [{"index": 0, "message": {"content": "Hi"}, "token_ids": [7, 8]}],
    "prompt_token_ids": [1, 2],
    "kv_transfer_params": {"remote_num_tokens": 5},
}


def test_a_whole_answer_loses_what_the_client_did_not_ask_for() -> None:
    body, end = take_from_body(json.dumps(WHOLE).encode(), keep_token_ids=False)
    assert json.loads(body) == {"id": "x", "choices": [{"index": 0, "message": {"content": "Hi"}}]}
    assert (end.params, end.token_ids) == ({"remote_num_tokens": 5}, [7, 8])


def test_a_client_that_asked_for_token_ids_gets_them() -> None:
    body, _ = take_from_body(json.dumps(WHOLE).encode(), keep_token_ids=True)
    kept = {name: value for name, value in WHOLE.items() if name != "kv_transfer_params"}
    assert json.loads(body) == kept


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b"null"])
def test_a_body_that_is_no_answer_is_passed_on(body: bytes) -> None:
    assert take_from_body(body, keep_token_ids=False) == (body, NOTHING_SAID)
