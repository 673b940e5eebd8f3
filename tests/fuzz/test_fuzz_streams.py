"""Any bytes, cut in any way, through the splitter and the answer stream.

What must hold: the pieces do not change what comes out; nothing but the reference is missing; the
reference never comes out, however its event is written down.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloop.engines.sse import EventSplitter, event_data, split_events
from kvloop.turn.answer_stream import NOTHING_SAID, AnswerStream

EXAMPLES = settings(max_examples=300, deadline=None)

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
MARKS = st.sampled_from([b"", b"\xef\xbb\xbf"])
cuts = st.lists(st.integers(0, 1_000_000), max_size=25)
SECRET = "engine-that-nobody-may-see"

texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            '"kv_transfer_params": {"remote_host": "h"}',
            '{"object":"kvloop.stream_reference"}',
            "data: [DONE]\n\n",
            "\r\n\r\ndata: {}",
            "\u2028\u2029\x85\x0b\x0c",
        ]
    ),
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in zip(marks, marks[1:], strict=False)]


def passed_on(data: bytes, places: list[int]) -> tuple[bytes, AnswerStream]:
    stream = AnswerStream()
    out = b"".join(stream.feed(piece) for piece in cut(data, places))
    return out + stream.finish(), stream


@st.composite
def events(draw: st.DrawFn, end: bytes) -> bytes:
    """One event of an answer as some server might write it."""
    kind = draw(st.sampled_from(["chunk", "comment", "fields", "many lines", "huge"]))
    if kind == "comment":
        return (
            b": "
            + draw(st.sampled_from([b"ping", b"", b"data: {}", b"kv_transfer_params"]))
            + end * 2
        )
    text = draw(texts)
    if kind == "huge":
        text = text * draw(st.integers(1, 3000))
    chunk = {"object": "chat.completion.chunk", "choices": [{"delta": {"content": text}}]}
    ascii_only = draw(st.booleans())
    body = json.dumps(chunk, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if kind == "fields":
        return b"id: 7" + end + b"event: message" + end + b"data:" + body + end * 2
    if kind == "many lines":
        body = json.dumps(chunk, indent=1).encode("utf-8", "surrogatepass")
        return b"".join(b"data: " + line + end for line in body.split(b"\n")) + end
    return b"data: " + body + end * 2


@st.composite
def references(draw: st.DrawFn, end: bytes) -> tuple[bytes, bool]:
    """A reference's event, and whether the client gets the event without it (vLLM 0.33)."""
    native = draw(st.booleans())
    message: dict[str, Any] = {"kv_transfer_params": {"remote_engine_id": SECRET}}
    if native:
        message = {"object": "chat.completion.chunk", "choices": [], **message}
    else:
        message = {"object": "kvloop.stream_reference", "token_ids": [1, 2], **message}
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    body = json.dumps(message, separators=separators).encode()
    before = draw(st.sampled_from([b"", b"id: 1" + end, b": note" + end, b"event: x" + end]))
    colon = draw(st.sampled_from([b"data: ", b"data:"]))
    return before + colon + body + end * 2, native


@EXAMPLES
@given(end=ENDS, mark=MARKS, places=cuts, data=st.data())
def test_the_reference_never_comes_out_and_all_else_does(
    end: bytes, mark: bytes, places: list[int], data: st.DataObject
) -> None:
    before = b"".join(data.draw(st.lists(events(end), max_size=4)))
    after = b"".join(data.draw(st.lists(events(end), max_size=2))) + b"data: [DONE]" + end * 2
    reference, native = data.draw(references(end))
    out, stream = passed_on(mark + before + reference + after, places)
    assert SECRET.encode() not in out
    assert stream.end.params == {"remote_engine_id": SECRET}
    out = out.removeprefix(mark)
    assert out.startswith(before)
    assert out.endswith(after)
    if not native:
        assert out == before + after


@EXAMPLES
@given(end=ENDS, mark=MARKS, places=cuts, data=st.data())
def test_an_answer_without_a_reference_comes_out_as_it_went_in(
    end: bytes, mark: bytes, places: list[int], data: st.DataObject
) -> None:
    whole = mark + b"".join(data.draw(st.lists(events(end), max_size=6)))
    out, stream = passed_on(whole, places)
    assert out == whole
    assert stream.end is NOTHING_SAID


@EXAMPLES
@given(data=st.binary(max_size=600), places=cuts)
@example(data=b'data: {"kv_transfer_params":1}\n\n' * 3, places=[5, 40])
@example(data=b"\r\n\r\n\n\n\r\r\n\r", places=[1, 2, 3, 4, 5])
def test_any_bytes_come_out_the_same_whatever_the_pieces(data: bytes, places: list[int]) -> None:
    splitter = EventSplitter()
    out = b"".join(splitter.feed(piece) for piece in cut(data, places)) + splitter.finish()
    assert out == data
    assert b"".join(split_events(data)) == data
    event_data(data)
    assert passed_on(data, places)[0] == passed_on(data, [])[0]


@EXAMPLES
@given(end=ENDS, places=cuts, data=st.data())
def test_nothing_is_held_back_once_an_event_is_whole(
    end: bytes, places: list[int], data: st.DataObject
) -> None:
    whole = b"".join(data.draw(st.lists(events(end), min_size=1, max_size=5)))
    splitter = EventSplitter()
    fed, out = b"", b""
    for piece in cut(whole, places):
        fed += piece
        out += splitter.feed(piece)
        unfinished = split_events(fed)[-1]
        is_whole = unfinished.endswith(end * 2)
        held = fed[len(out) :]
        assert held == (b"" if is_whole else unfinished)
