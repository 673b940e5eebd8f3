"""What clients do: conversations that go on, are edited, branch; and what must come out of them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from kvloop.turn.request import Api
from tests.double.parsing import Parsed, parse
from tests.double.sampler import Style, reference_answer
from tests.double.tokens import decode, render_chat

WORDS = ("river", "hill", "stone", "bridge", "cloud", "boat", "field", "lamp", "road", "winter")
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
ADAPTERS = ("adapter-a", "adapter-b")
HOSTILE: list[dict[str, Any]] = [
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]]}},
    {"kv_transfer_params": "a string"},
    {"vllm_xargs": {"kv_transfer_params": "a string"}},
    {"kv_transfer_params": {"do_remote_decode": True, "remote_num_tokens": 10_000}},
]


class Model(NamedTuple):
    """What the engines of a world run."""

    style: Style
    strips_reasoning: bool
    parses_output: bool
    stamps: bool = False
    """Each turn's prompt begins with other words, of which the router is told nothing."""


class Identity(NamedTuple):
    """What must be equal before one turn's KV may serve another."""

    tenant: str
    api: Api
    model: str
    salt: str | None
    has_tools: bool


class Turn(NamedTuple):
    """One request of a client's."""

    identity: Identity
    body: dict[str, Any]
    reuse: bool = True
    is_last: bool = False
    leaves_after_s: float | None = None


@dataclass
class Conversation:
    """Its messages so far (chat), or its token ids (completions)."""

    identity: Identity
    messages: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def text_of(chance: random.Random, low: int = 3, high: int = 20) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(low, high)))


def new_identity(chance: random.Random) -> Identity:
    return Identity(
        tenant=chance.choice(["", "", "tenant-1", "tenant-2"]),
        api=chance.choices([Api.CHAT, Api.COMPLETIONS], [4, 1])[0],
        model=chance.choices(["double", *ADAPTERS], [4, 1, 1])[0],
        salt=chance.choices([None, "salt-1", "salt-2"], [4, 1, 1])[0],
        has_tools=chance.random() < 0.2,
    )


def begin(chance: random.Random) -> Conversation:
    """A conversation's first messages. Many begin alike: systems prompts and questions repeat."""
    identity = new_identity(chance)
    if identity.api is Api.COMPLETIONS:
        text = text_of(random.Random(chance.randrange(12)), 8, 25)
        return Conversation(identity._replace(has_tools=False), ids=[ord(one) for one in text])
    shared = random.Random(chance.randrange(12))
    messages = [
        {"role": "system", "content": text_of(shared, 4, 12)},
        {"role": "user", "content": text_of(shared)},
    ]
    return Conversation(identity, messages=messages[chance.randrange(2) :])


def change(conversation: Conversation, chance: random.Random) -> None:
    """A client rewrites history: edits, cuts out, goes back, strips."""
    if conversation.identity.api is Api.COMPLETIONS:
        ids = conversation.ids
        at = chance.randrange(len(ids))
        if chance.random() < 0.5:
            ids[at] = ord(chance.choice("xyz"))
        else:
            del ids[max(4, at) :]
        return
    messages = conversation.messages
    match chance.randrange(4):
        case 0:  # edit one message
            at = chance.randrange(len(messages))
            messages[at] = {"role": messages[at]["role"], "content": text_of(chance)}
        case 1 if len(messages) > 3:  # compact: something in the middle goes
            first = chance.randrange(1, len(messages) - 1)
            del messages[first : first + 2]
        case 2 if len(messages) > 2:  # go back and branch off
            del messages[chance.randrange(1, len(messages)) :]
        case _:  # drop what was thought
            conversation.messages = messages = [  # others: turns under way still have the old ones
                {key: value for key, value in message.items() if key != "reasoning"}
                for message in messages
            ]
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": text_of(chance)})


def body_of(conversation: Conversation, chance: random.Random) -> dict[str, Any]:
    identity = conversation.identity
    body: dict[str, Any] = {
        "model": identity.model,
        "max_tokens": chance.randint(1, 30),
        "stream": chance.random() < 0.7,
    }
    if identity.salt is not None:
        body["cache_salt"] = identity.salt
    if identity.has_tools:
        body["tools"] = TOOLS
    if chance.random() < 0.5:
        body["return_token_ids"] = True
    if chance.random() < 0.05:
        body["n"] = 2
    if chance.random() < 0.05:
        body["stop"] = ["qu"]
    if chance.random() < 0.05:
        body |= chance.choice(HOSTILE)
    if identity.api is Api.CHAT:
        body["messages"] = [dict(message) for message in conversation.messages]
    elif chance.random() < 0.5 and all(one < 0x11_0000 for one in conversation.ids):
        body["prompt"] = "".join(map(chr, conversation.ids))
    else:
        body["prompt"] = list(conversation.ids)
    return body


def turn_of(conversation: Conversation, chance: random.Random) -> Turn:
    return Turn(
        conversation.identity,
        body_of(conversation, chance),
        reuse=chance.random() > 0.05,
        is_last=chance.random() < 0.03,
        leaves_after_s=chance.uniform(0, 1.2) if chance.random() < 0.06 else None,
    )


@lru_cache(4096)
def _answer(ids: tuple[int, ...], num: int, salt: str, adapter: str, style: Style) -> list[int]:
    return reference_answer(list(ids), num, salt, adapter=adapter, style=style)


def right_answer(turn: Turn, model: Model) -> list[int]:
    """What an engine that computed everything would say."""
    body = turn.body
    if turn.identity.api is Api.CHAT:
        ids = render_chat(
            body["messages"],
            strips_reasoning=model.strips_reasoning,
            tools=body.get("tools"),
            stamped=model.stamps,
        )
    else:
        prompt = body["prompt"]
        ids = [ord(one) for one in prompt] if isinstance(prompt, str) else prompt
    adapter = body["model"] if body["model"] in ADAPTERS else ""
    return _answer(
        tuple(ids), body["max_tokens"], body.get("cache_salt") or "", adapter, model.style
    )


def go_on(conversation: Conversation, turn: Turn, model: Model, chance: random.Random) -> None:
    """The client's next messages, after the right answer to ``turn``."""
    tokens = right_answer(turn, model)
    if turn.identity.api is Api.COMPLETIONS:
        prompt = turn.body["prompt"]
        ids = [ord(one) for one in prompt] if isinstance(prompt, str) else list(prompt)
        conversation.ids = [*ids, *tokens, *(ord(one) for one in text_of(chance, 2, 8))]
        return
    said = as_parsed(tokens, model)
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning and chance.random() < 0.6:
        message["reasoning"] = said.reasoning
    messages = [*turn.body["messages"], message]
    if said.tool_calls:
        message["tool_calls"] = said.tool_calls
        call_id = said.tool_calls[0]["id"]
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text_of(chance)})
    else:
        messages.append({"role": "user", "content": text_of(chance)})
    conversation.messages = messages


def as_parsed(tokens: list[int], model: Model) -> Parsed:
    text = decode(tokens)
    return parse(text, finished=True) if model.parses_output else Parsed("", text, [])


def fault_of(turn: Turn, model: Model, whole: bytes, *, streamed: bool) -> str | None:
    """What is wrong with a complete answer; None if nothing is."""
    for private in (b"kv_transfer_params", b"kvloop.stream_reference", b"remote_block_ids"):
        if private in whole:
            return f"the client sees {private.decode()}"
    tokens = right_answer(turn, model)
    choices = _choices(whole, streamed=streamed)
    if len(choices) != (turn.body.get("n") or 1):
        return f"{len(choices)} choices"
    for choice in choices:
        wrong = _compare(turn, model, choice, tokens)
        if wrong is not None:
            return wrong
    return None


def _compare(turn: Turn, model: Model, choice: _Choice, tokens: list[int]) -> str | None:
    stops = turn.body.get("stop")
    if turn.body.get("return_token_ids") and not stops:
        return None if choice.ids == tokens else f"tokens {choice.ids} instead of {tokens}"
    if choice.ids and not turn.body.get("return_token_ids"):
        return "the client sees token ids that it did not ask for"
    wanted = decode(tokens)
    if stops:
        wanted = wanted.partition(stops[0])[0]
    chat = turn.identity.api is Api.CHAT
    said = as_parsed(tokens, model) if chat and not stops else Parsed("", wanted, [])
    if stops and model.parses_output and chat:
        said = parse(wanted, finished=True)
    if (choice.content, choice.reasoning) != (said.content, said.reasoning):
        return f"{choice.content!r} ({choice.reasoning!r}) instead of {said}"
    return None


@dataclass
class _Choice:
    content: str = ""
    reasoning: str = ""
    ids: list[int] = field(default_factory=list)


def _choices(whole: bytes, *, streamed: bool) -> list[_Choice]:
    found: dict[int, _Choice] = {}
    if streamed:
        events = [event for event in whole.decode().split("\n\n") if event.startswith("data: {")]
        messages = [json.loads(event[6:]) for event in events]
    else:
        messages = [json.loads(whole)]
    for message in messages:
        for said in message.get("choices", ()):
            choice = found.setdefault(said["index"], _Choice())
            part = said.get("delta") or said.get("message") or {}
            choice.content += said.get("text") or part.get("content") or ""
            choice.reasoning += part.get("reasoning") or ""
            choice.ids += said.get("token_ids") or ()
    return list(found.values())
