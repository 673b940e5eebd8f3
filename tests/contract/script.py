"""Runs the steps on a target and writes down what was seen: the same lines for every target."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.contract.target import BLOCK_SIZE, ENGINES, Gauges, Target

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OUTPUT = 3
"""Tokens of an answer; few, as they cost most of the script's time on small machines."""
COLD = {"do_remote_decode": True, "do_remote_prefill": False}
Ids = list[int]
Params = dict[str, Any]
Seen = dict[str, Any]
_SAME_LOGPROB = 0.01
"""Between runs on the same KV float32 differs by less than a thousandth."""
_READER = {"P": "D", "D": "P"}


@dataclass(frozen=True, slots=True)
class Leg:
    """What one request to one engine came to."""

    status: int
    body: Any

    @property
    def params(self) -> Params:
        """The reference that it leaves; AssertionError if there is none."""
        params = self.body["kv_transfer_params"]
        assert isinstance(params, dict), self.body
        return params

    @property
    def output(self) -> Ids:
        return list(self.body["choices"][0]["token_ids"])

    def says_the_same_as(self, other: Leg) -> bool:
        """Equal tokens, as likely: other KV may lead to the same tokens by chance."""
        if self.output != other.output:
            return False
        ours, theirs = (leg.body["choices"][0]["logprobs"] for leg in (self, other))
        if ours is None or theirs is None:
            return True
        pairs = zip(ours["token_logprobs"], theirs["token_logprobs"], strict=True)
        return all(abs(one - two) < _SAME_LOGPROB for one, two in pairs)

    def summary(self) -> Seen:
        """Status, and what a client or a router reads from the body."""
        if self.status != 200:
            return {"status": self.status, "error": self.body["error"]["type"]}
        choice, usage = self.body["choices"][0], self.body["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        seen: Seen = {
            "status": self.status,
            "finish": choice["finish_reason"],
            "prompt": usage["prompt_tokens"],
            "completion": usage["completion_tokens"],
            "cached": cached,
        }
        return {**seen, **reference_summary(self.body.get("kv_transfer_params"))}


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished turn: its prompt, what D generated, what P and D said of their KV."""

    prompt: Ids
    output: Ids
    prefilled: Params
    reference: Params

    @property
    def history(self) -> Ids:
        return [*self.prompt, *self.output]


@dataclass
class Context:
    """One step's hands and eyes."""

    target: Target
    seen: Seen = field(default_factory=dict)
    _words: Ids = field(default_factory=list)
    _before: dict[str, Gauges] = field(default_factory=dict)
    _left: dict[str, tuple[str, Params]] = field(default_factory=dict)

    # Prompts

    def fresh(self, num_tokens: int) -> Ids:
        """Tokens that no other prompt has."""
        taken, self._words = self._words[:num_tokens], self._words[num_tokens:]
        assert len(taken) == num_tokens
        return taken

    # Requests

    async def ask(self, engine: str, path: str = COMPLETIONS, **body: Any) -> Leg:
        """One request, greedy and with ids; remembers the reference that it leaves."""
        common = {"model": self.target.model, "temperature": 0, "return_token_ids": True}
        leg = Leg(*await self.target.post(engine, path, {**common, **body}))
        self.remember(engine, leg.body)
        return leg

    async def prefill(
        self, prompt: Ids, reference: Params | None = None, *, engine: str = "P", **body: Any
    ) -> Leg:
        """P's leg. It may be asked for more than one token: then its own KV answers."""
        params = {**(reference or {}), **COLD}
        asked = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, **body}
        return await self.ask(engine, kv_transfer_params=params, **asked)

    async def decode(self, prompt: Ids, prefilled: Params, **body: Any) -> Leg:
        """D's leg."""
        asked = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, **body}
        return await self.ask("D", kv_transfer_params=prefilled, **asked)

    async def turn(self, num_tokens: int = 106, **body: Any) -> Turn:
        """A finished turn on a fresh prompt."""
        prompt = self.fresh(num_tokens)
        prefilled = (await self.prefill(prompt, **body)).params
        answered = await self.decode(prompt, prefilled, **body)
        return Turn(prompt, answered.output, prefilled, answered.params)

    async def held(self, num_tokens: int = 106) -> Turn:
        """Blocks on P, for steps in which D, which has a prefix cache, is the one that pulls."""
        prompt = self.fresh(num_tokens)
        leg = await self.prefill(prompt, max_tokens=OUTPUT)
        return Turn(prompt, leg.output, leg.params, leg.params)

    async def pulled(self, prompt: Ids, reference: Params | None, engine: str = "P") -> Seen:
        """P with a reference, asked for a few tokens: what it says, and whether it is right."""
        leg = await self.prefill(prompt, reference, engine=engine, max_tokens=OUTPUT, logprobs=1)
        if leg.status != 200:
            return leg.summary()
        return {**leg.summary(), "right": leg.says_the_same_as(await self.truth(prompt))}

    async def truth(self, prompt: Ids) -> Leg:
        """What an engine says that computes everything."""
        asked = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 1}
        return await self.ask("P", **asked)

    async def release(self, reference: Params, *, by: str) -> Leg:
        """Free a producer's blocks without a read: a request that ``by`` rejects."""
        params = {**reference, "do_remote_prefill": True, "do_remote_decode": False}
        return await self.ask(by, model="nobody", prompt=[1], kv_transfer_params=params)

    # Observations

    def note(self, **seen: Any) -> None:
        self.seen.update(seen)

    async def look(self, when: str = "then", engines: tuple[str, ...] = ENGINES) -> None:
        """Write down what has changed on the engines since the last look."""
        now = await self.target.settled()
        self.seen[when] = {
            name: changed
            for name in engines
            if (changed := now[name].since(self._before[name], self.target.block_bytes))
        }
        self._before = now

    def remember(self, engine: str, body: Any) -> None:
        """What is to be given back at the end of the step, if the body has it."""
        params = body.get("kv_transfer_params") if isinstance(body, dict) else None
        if isinstance(params, dict):
            self._left[params["remote_request_id"]] = (engine, params)

    async def begin(self, words: Ids) -> None:
        """Forget the step before and give its blocks back; new prompts are made of ``words``."""
        for engine, params in self._left.values():
            await self.release(params, by=_READER[engine])
        self._left.clear()
        self.seen, self._words = {}, words
        self._before = await self.target.settled()


Step = Callable[[Context], Awaitable[None]]


def trimmed(reference: Params, num_tokens: int) -> Params:
    """The reference for its first tokens."""
    (blocks,) = reference["remote_block_ids"]
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return {
        **reference,
        "remote_num_tokens": num_tokens,
        "remote_block_ids": [blocks[:num_blocks]],
    }


def reference_summary(params: Params | None) -> Seen:
    """How much a reference says is kept; None where there is none."""
    if params is None:
        return {"reference": None}
    blocks = [len(group) for group in params["remote_block_ids"]]
    seen: Seen = {"reference": {"tokens": params["remote_num_tokens"], "blocks": blocks}}
    if "remote_prefill_cached_tokens" in params:
        seen["reference"]["cached"] = params["remote_prefill_cached_tokens"]
    return seen


def types(value: Any) -> Any:
    """The shape of a JSON value: names and types, no values."""
    if isinstance(value, dict):
        return {name: types(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [types(value[0])] if value else []
    return "null" if value is None else type(value).__name__


async def run(target: Target, steps: list[Step]) -> AsyncIterator[tuple[str, Seen]]:
    """Each step's name and what was seen, as they are done."""
    context = Context(target)
    for step in steps:
        await context.begin(await _words(target, step.__name__))
        await step(context)
        yield step.__name__, json.loads(json.dumps(context.seen))
    await context.begin([])


async def _words(target: Target, step: str) -> Ids:
    """Token ids of words in no order, other ones for each step: KV of one place fits no other."""
    picked = random.Random(step).choices(_WORDS, k=_NUM_WORDS)
    asked = {"model": target.model, "prompt": " ".join(picked), "add_special_tokens": False}
    status, body = await target.post("P", "/tokenize", asked)
    assert status == 200, body
    ids: Ids = body["tokens"]
    return ids


_NUM_WORDS = 500
_VOCABULARY = """
river forest harbour valley glacier bridge island desert meadow canal lighthouse copper violin
seven doctor winter yellow engine paper castle pepper mirror Tuesday elephant quickly because
under Paris algebra hammer silver never justice tomato planet window garden lemon shadow twelve
captain whisper orange battery kingdom library March soldier butter thunder velvet Norway pencil
dragon market yesterday freedom carbon tiger museum potato gravity broken sailor cotton election
honey
"""
_WORDS = _VOCABULARY.split()


def differences(expected: dict[str, Seen], seen: dict[str, Seen]) -> dict[str, tuple[Any, Any]]:
    """``step.observation`` to both values, where they are not equal."""
    found: dict[str, tuple[Any, Any]] = {}
    for step in dict.fromkeys([*expected, *seen]):
        ours, theirs = expected.get(step, {}), seen.get(step, {})
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name, _NOTHING) != theirs.get(name, _NOTHING):
                pair = (ours.get(name, _NOTHING), theirs.get(name, _NOTHING))
                found[f"{step}.{name}"] = pair
    return found


_NOTHING = "(not seen)"
