"""The splitter: whole events out, bytes untouched, nothing held back that is complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.engines import sse
from kvloop.engines.sse import EventSplitter, EventTooLargeError, event_data, split_events

event = st.builds(
    lambda body, end: b"data: " + body.replace(b"\n", b"").replace(b"\r", b"") + end,
    st.binary(max_size=40),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in zip(marks, marks[1:], strict=False)]


@given(events=st.lists(event, max_size=10), cuts=st.lists(st.integers(0, 10_000), max_size=20))
def test_any_cutting_gives_the_same_bytes_in_whole_events(
    events: list[bytes], cuts: list[int]
) -> None:
    splitter = EventSplitter()
    given_out = [splitter.feed(piece) for piece in pieces_of(b"".join(events), cuts)]
    assert all(out == b"" or out.endswith((b"\n\n", b"\r\n\r\n")) for out in given_out)
    assert b"".join(given_out) == b"".join(events)
    assert splitter.finish() == b""


@given(st.binary(max_size=300), st.lists(st.integers(0, 10_000), max_size=20))
def test_bytes_that_are_no_events_come_out_as_they_went_in(data: bytes, cuts: list[int]) -> None:
    splitter = EventSplitter()
    out = b"".join(splitter.feed(piece) for piece in pieces_of(data, cuts)) + splitter.finish()
    assert out == data


def test_k18_a_complete_event_is_given_out_at_once() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert splitter.feed(b"\n") == b"data: 2\n\n"


@given(events=st.lists(event, min_size=1, max_size=10))
def test_split_events_loses_nothing(events: list[bytes]) -> None:
    assert split_events(b"".join(events)) == events


def test_event_data_follows_the_standard() -> None:
    assert event_data(b": comment\nevent: x\ndata: one\ndata:two\nid: 3\n\n") == b"one\ntwo"


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    splitter.feed(b"x" * 100)
    with pytest.raises(EventTooLargeError):
        splitter.feed(b"x")
