"""Plays the conversation through the router, twice per turn, and measures what a client sees."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from kvloop.cluster.engine_spec import SERVED_MODEL_NAME
from kvloop.demo.conversation import MAX_TOKENS, Message, opening, tool_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

_ROUTE: Final = re.compile(r"(?P<kind>\w+); pulled=(?P<pulled>\d+); computed=(?P<computed>\d+)")


@dataclass(frozen=True, slots=True)
class Leg:
    """One answer, as the client saw it."""

    text: str
    ttft_s: float
    """From sending the request to the first piece of text."""
    prompt_tokens: int
    kind: str
    pulled_tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn without reuse and with it."""

    turn: int
    off: Leg
    on: Leg
    nixl_bytes: int
    """What P's own metrics say it read from D during the leg with reuse."""

    @property
    def identical(self) -> bool:
        """Whether both answers are the same text."""
        return self.off.text == self.on.text

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came with reuse."""
        return self.off.ttft_s / self.on.ttft_s


async def play(
    client: AsyncOpenAI,
    num_turns: int,
    report: Callable[[TurnResult], None],
    bytes_read: Callable[[], Awaitable[int]],
) -> list[TurnResult]:
    """Play ``num_turns`` turns; tells ``report`` of each.

    ``bytes_read``: what P has read from D so far, by its own metrics.

    Both legs of a turn send the same messages, so their answers can be compared; a cache salt for
    each keeps them out of each other's prefix caches. Which goes first alternates.
    """
    salt = secrets.token_hex(4)
    messages = opening(salt)
    results = []
    for turn in range(1, num_turns + 1):
        legs, moved = {}, {}
        for reuse in ("off", "on") if turn % 2 else ("on", "off"):
            before = await bytes_read()
            legs[reuse] = await ask(client, messages, reuse, f"{salt}-{reuse}")
            moved[reuse] = await bytes_read() - before
        result = TurnResult(turn, legs["off"], legs["on"], moved["on"])
        report(result)
        results.append(result)
        messages = [
            *messages,
            {"role": "assistant", "content": result.off.text},
            *tool_result(turn),
        ]
    return results


async def warm_up(client: AsyncOpenAI) -> None:
    """Two short turns of another conversation: the engines shake hands in both directions."""
    salt = secrets.token_hex(4)
    messages: list[Message] = [
        {"role": "user", "content": f"Say hello to number {salt}. " + "Take your time. " * 40}
    ]
    first = await ask(client, messages, "on", salt)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Bye."}]
    await ask(client, messages, "on", salt)


async def ask(client: AsyncOpenAI, messages: Sequence[Message], reuse: str, cache_salt: str) -> Leg:
    """One streamed answer at temperature 0."""
    started_s = time.perf_counter()
    raw = await client.chat.completions.with_raw_response.create(
        model=SERVED_MODEL_NAME,
        messages=cast("list[ChatCompletionMessageParam]", list(messages)),
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": cache_salt},
        extra_headers={"x-kvloop-reuse": reuse},
    )
    text, ttft_s, prompt_tokens = "", None, 0
    async for chunk in raw.parse():
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            ttft_s = ttft_s if ttft_s is not None else time.perf_counter() - started_s
            text += piece
    route = _ROUTE.match(raw.headers.get("x-kvloop-route", ""))
    if route is None or ttft_s is None:
        raise RuntimeError(
            f"the router's answer cannot be measured: route "
            f"{raw.headers.get('x-kvloop-route')!r}, text {text!r}"
        )
    return Leg(
        text=text,
        ttft_s=ttft_s,
        prompt_tokens=prompt_tokens,
        kind=route["kind"],
        pulled_tokens=int(route["pulled"]),
        computed_tokens=int(route["computed"]),
    )
