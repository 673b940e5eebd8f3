"""The next token as a function of the last KV attended to, and the answer it should all come to."""

from __future__ import annotations

from dataclasses import dataclass

from kvloop.turn.canary import CANARY_SALT
from tests.double.kv import Seed, chain, next_kv, seed_of
from tests.double.tokens import IM_END, encode, pair

_FREE = None
_Script = list[int | None]


@dataclass(frozen=True)
class Style:
    """What answers look like.

    ``thinks``: they begin with ``<think>....</think>``. ``calls_tools``: they end with one call of
    ``look_up``. ``pairs``: some letters come two in a token, which :func:`encode` never does.
    ``ends``: how often letters are the end of the answer, once in so many.
    """

    thinks: bool = False
    calls_tools: bool = False
    pairs: bool = False
    ends: int = 499

    def script(self) -> _Script:
        """Tokens that are given, and those that come from KV, up to where letters go on freely."""
        script: _Script = []
        if self.thinks:
            script += [*encode("<think>"), *[_FREE] * 8, *encode("</think>")]
        if self.calls_tools:
            opening = encode('<tool_call>{"name": "look_up", "arguments": {"word": "')
            script += [*[_FREE] * 4, *opening, *[_FREE] * 6, *encode('"}}</tool_call>'), IM_END]
        return script


PLAIN = Style()


def identity_seed(salt: str = "", adapter: str = "", media: str = "") -> Seed:
    """Where a chain starts: different adapters, salts and media never share KV.

    In life a salt changes no KV, only the hashes. Here it does, so that an attach across salts
    shows in the answer; but not the salts by which the router only keeps out of prefix caches.
    """
    own = "" if salt.startswith(CANARY_SALT) else salt
    return Seed(
        kv=seed_of(f"{own}\0{adapter}\0{media}"),
        hashes=seed_of(f"hashes {salt}\0{adapter}\0{media}"),
    )


def sample(kv: int, number: int, style: Style = PLAIN) -> int:
    """The answer's token ``number``, greedily."""
    script = style.script()
    scripted = number < len(script)
    given = script[number] if scripted else None
    if given is not None:
        return given
    drawn = kv
    if not scripted and drawn % style.ends == 0:
        return IM_END
    first = drawn // style.ends % 26
    if style.pairs and drawn // 7919 % 5 == 0:
        return pair(first, drawn // 104_729 % 26)
    return ord("a") + first


def reference_answer(
    prompt: list[int],
    max_tokens: int,
    salt: str = "",
    *,
    adapter: str = "",
    media: str = "",
    style: Style = PLAIN,
    ignore_eos: bool = False,
) -> list[int]:
    """The answer of an engine that computed everything."""
    kv = chain(identity_seed(salt, adapter, media).kv, prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(sample(kv, len(output), style))
        if output[-1] == IM_END and not ignore_eos:
            break
        kv = next_kv(kv, output[-1])
    return output
