"""The toy tokenizer, template and answers."""

from typing import Any

import pytest

from tests.double.engine import Engine, Fabric, Style, reference_answer
from tests.double.parsing import parse
from tests.double.tokens import IM_END, IM_START, decode, encode, media_hashes, render_chat

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "<think>t</think>a"},
    {"role": "user", "content": "v"},
]


def test_text_survives_and_special_tokens_are_not_shown() -> None:
    assert decode([IM_START, *encode("Grüße, 世界 🦀"), IM_END]) == "Grüße, 世界 🦀"


def test_a_rendered_history_starts_with_the_prompt_and_the_generated_ids() -> None:
    prompt = render_chat(MESSAGES[:2])
    answer = reference_answer(prompt, 500)
    assert answer[-1] == IM_END
    messages = [*MESSAGES[:2], {"role": "assistant", "content": decode(answer)}, MESSAGES[3]]
    assert render_chat(messages)[: len(prompt) + len(answer)] == [*prompt, *answer]


def test_pair_tokens_come_back_from_text_as_other_ids() -> None:
    answer = reference_answer([1, 2, 3], 100, style=Style(pairs=True))
    assert encode(decode(answer)) != [token for token in answer if token != IM_END]


def test_reasoning_of_earlier_turns_is_stripped_only_by_templates_that_strip_it() -> None:
    assert "<think>t</think>a" in decode(render_chat(MESSAGES))
    assert "<think>" not in decode(render_chat(MESSAGES, strips_reasoning=True))
    within = [*MESSAGES[:3], {"role": "tool", "content": "found"}]
    assert "<think>t</think>a" in decode(render_chat(within, strips_reasoning=True))


def test_reasoning_sent_as_a_field_renders_as_it_was_generated() -> None:
    as_field = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    assert render_chat([*MESSAGES[:2], as_field]) == render_chat(MESSAGES[:3])


def test_tools_their_calls_and_their_results_are_rendered() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = decode(render_chat(messages, tools=[{"type": "function"}]))
    assert '<tools>\n{"type": "function"}' in text
    assert '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>' in text
    assert "<tool_response>2</tool_response>" in text


def test_media_are_placeholders_whose_hashes_differ() -> None:
    def seen(url: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    assert render_chat(seen("a")) == render_chat(seen("b"))
    assert media_hashes(seen("a")) != media_hashes(seen("b"))


def test_a_thinking_and_tool_calling_model_is_parsed_into_parts() -> None:
    engine = Engine(Fabric())
    engine.style = Style(thinks=True, calls_tools=True)
    served = engine.serve([1, 2, 3], 500)
    assert served.output == reference_answer([1, 2, 3], 500, style=engine.style)
    parsed = parse(decode(served.output), finished=True)
    assert len(parsed.reasoning) == 8
    assert len(parsed.content) == 4
    assert parsed.tool_calls[0]["function"]["name"] == "look_up"


@pytest.mark.parametrize("text", ["<think>ab</think>cd<tool_call>", "no tags <at all>"])
def test_what_the_parser_has_said_it_never_takes_back(text: str) -> None:
    before = parse("", finished=False)
    for end in range(1, len(text) + 1):
        now = parse(text[:end], finished=False)
        assert now.reasoning.startswith(before.reasoning)
        assert now.content.startswith(before.content)
        before = now
