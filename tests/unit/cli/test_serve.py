"""`kvloop serve`: what it asks of the system before it serves."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from kvloop.cli import serve
from kvloop.config import Settings


@pytest.mark.parametrize(
    ("limits", "becomes", "warns"),
    [
        ((100, 5000), (456, 5000), False),
        ((100, resource.RLIM_INFINITY), (456, resource.RLIM_INFINITY), False),
        ((100, 300), (300, 300), True),
        ((5000, 5000), None, False),
    ],
)
def test_open_files_are_raised_to_what_connections_need(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limits: tuple[int, int],
    becomes: tuple[int, int] | None,
    warns: bool,
) -> None:
    was_set: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: was_set.append(new))
    serve._allow_open_files(Settings(max_connections=100))
    assert was_set == ([becomes] if becomes else [])
    assert ("ulimit" in caplog.text) == warns
