"""Message chains: equal spellings find each other, different conversations do not."""

from typing import Any

import pytest

from kvloop.proof.chain import Identity, message_chain, token_chain
from tests.builders import FINGERPRINTER

ME = Identity(tenant="t", api="chat", model="m")
SYSTEM = {"role": "system", "content": "You help."}
USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}


def last_key(*messages: dict[str, Any], identity: Identity = ME) -> bytes:
    return message_chain(identity, messages)[-1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, {"content": "Hello", "role": "user"}),
        (USER, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}),
        (USER, {**USER, "name": None}),
        (ANSWER, {**ANSWER, "reasoning_content": "They greet me.", "reasoning": "x"}),
        (ANSWER, {**ANSWER, "tool_calls": []}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "tool_calls": [_call := {"function": {"name": "f"}}]},
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", **_call}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a":1,"b":2}'}}]},
            {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"b": 2, "a": 1}'}}]},
        ),
    ],
)
def test_equal_spellings_have_one_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert last_key(USER, one) == last_key(USER, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, {**USER, "content": "Hello!"}),
        (USER, {**USER, "role": "tool"}),
        (USER, {**USER, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}),
        ({"role": "tool", "tool_call_id": "1"}, {"role": "tool", "tool_call_id": "2"}),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "not json"}}]},
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "not  json"}}]},
        ),
    ],
)
def test_different_messages_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert last_key(USER, one) != last_key(USER, other)


@pytest.mark.parametrize(
    "other",
    [
        Identity(tenant="u", api="chat", model="m"),
        Identity(tenant="t", api="chat", model="n"),
        Identity(tenant="t", api="completions", model="m"),
        Identity(tenant="t", api="chat", model="m", cache_salt="salt"),
        Identity(tenant="t", api="chat", model="m", template="{{ messages }}"),
        Identity(tenant="t", api="chat", model="m", tools=[{"type": "function"}]),
    ],
)
def test_every_part_of_the_identity_separates(other: Identity) -> None:
    assert not set(message_chain(ME, [USER])) & set(message_chain(other, [USER]))
    prefixes = FINGERPRINTER.prefixes(list(range(640)))
    assert not set(token_chain(ME, prefixes)) & set(token_chain(other, prefixes))


def test_a_continued_conversation_keeps_its_earlier_keys() -> None:
    first = message_chain(ME, [SYSTEM, USER])
    assert message_chain(ME, [SYSTEM, USER, ANSWER, USER])[: len(first)] == first


def test_a_shared_system_prompt_alone_is_no_shared_conversation() -> None:
    one = message_chain(ME, [SYSTEM, USER])
    other = message_chain(ME, [SYSTEM, {**USER, "content": "Something else"}])
    assert not set(one) & set(other)


def test_messages_without_any_user_still_have_keys() -> None:
    assert len(message_chain(ME, [SYSTEM])) == 1


def test_the_order_of_messages_matters() -> None:
    assert last_key(USER, ANSWER) != last_key(ANSWER, USER)


def test_long_prompts_of_tokens_share_a_key_deep_in_their_common_prefix() -> None:
    shared = list(range(20_000))
    one = token_chain(ME, FINGERPRINTER.prefixes([*shared, *range(5000)]))
    other = token_chain(ME, FINGERPRINTER.prefixes([*shared, *range(7, 5007)]))
    common = [key for key in one if key in set(other)]
    assert common == one[: len(common)]
    deepest_units = len(common)
    assert deepest_units > 0
    assert len(one) < 250


def test_a_short_prompt_of_tokens_has_a_key_every_64_tokens() -> None:
    assert len(token_chain(ME, FINGERPRINTER.prefixes(list(range(260))))) == 4
