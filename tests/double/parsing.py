"""A parser of reasoning and tool calls, as vLLM's ``--reasoning-parser`` and its like are."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"


class Parsed(NamedTuple):
    """The parts of an answer so far."""

    reasoning: str
    content: str
    tool_calls: list[dict[str, Any]]

    def message(self) -> dict[str, Any]:
        said: dict[str, Any] = {"content": self.content or None}
        said["reasoning"] = self.reasoning or None
        if self.tool_calls:
            said["tool_calls"] = self.tool_calls
        return said

    def since(self, before: Parsed) -> dict[str, Any] | None:
        """A stream's delta; None if nothing is new."""
        delta: dict[str, Any] = {}
        if self.reasoning != before.reasoning:
            delta["reasoning"] = self.reasoning[len(before.reasoning) :]
        if self.content != before.content:
            delta["content"] = self.content[len(before.content) :]
        new = self.tool_calls[len(before.tool_calls) :]
        if new:
            first = len(before.tool_calls)
            delta["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(new)]
        return delta or None


def parse(text: str, *, finished: bool) -> Parsed:
    """What is certain of ``text``: a tag that may still become one is kept back."""
    reasoning = ""
    if not finished and _THINK.startswith(text):
        return Parsed("", "", [])
    if text.startswith(_THINK):
        reasoning, closed, text = text[len(_THINK) :].partition(_THOUGHT)
        if not closed:
            return Parsed(_certain(reasoning, _THOUGHT, finished=finished), "", [])
    content, opened, rest = text.partition(_CALL)
    calls: list[dict[str, Any]] = []
    while opened and _CALLED in rest:
        called, _, rest = rest.partition(_CALLED)
        calls.append(_call(json.loads(called), len(calls)))
        _, opened, rest = rest.partition(_CALL)
    if not calls and not opened:
        content = _certain(content, _CALL, finished=finished)
    return Parsed(reasoning, content, calls)


def _certain(text: str, tag: str, *, finished: bool) -> str:
    if finished:
        return text
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length]
    return text


def _call(called: dict[str, Any], number: int) -> dict[str, Any]:
    function = {"name": called["name"], "arguments": json.dumps(called["arguments"])}
    return {"id": f"chatcmpl-tool-{number}", "type": "function", "function": function}
