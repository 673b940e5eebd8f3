"""The canary: for a share of pulled turns, P computes the same prompt cold, and both are compared.

P's leg gives one token that nobody sees. Asked for it, P says how likely it found the best few
tokens there; so does a cold run of the same token ids on the same P, under a cache salt of its own:
no prefix cache helps it, none is filled, nothing is pinned. vLLM's log-probabilities are those
before temperature and penalties (`logprobs_mode=raw_logprobs`), so the client's sampling plays no
part. KV that is not this prompt's gives another distribution.

It runs beside the traffic, one at a time; a turn never waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvloop.engines.client import EngineError
from kvloop.turn.request import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvloop.engines.client import EngineClient
    from kvloop.engines.pairs import Pairs
    from kvloop.observe.metrics import Metrics
    from kvloop.turn.bodies import PromptIds
    from kvloop.turn.plan import ProvenPrompt
    from kvloop.turn.request import TurnRequest

logger = logging.getLogger("kvloop.canary")

CANARY_SALT: Final = "kvloop-canary-"
TOP_TOKENS: Final = 5
_GROSS: Final = 4.0
"""Times the tolerance: one such divergence is enough."""
_MILD_ALLOWED: Final = 1
_REMEMBERED: Final = 20
"""Checks of a pair of which no more than :data:`_MILD_ALLOWED` may diverge mildly."""
_TIMEOUT_S: Final = 600.0
_ASKED_OF_BOTH: Final = {
    "temperature": 0,
    # Ids, whatever the client asked for: several tokens may have one text.
    "return_tokens_as_token_ids": True,
}


def divergence(pulled: Mapping[str, float], cold: Mapping[str, float]) -> float:
    """How far apart two distributions are at least, in nats: by the best token of each.

    Raises ValueError if one of them is empty.
    """
    if not pulled or not cold:
        raise ValueError("no log-probabilities to compare")
    return max(_gap(pulled, cold), _gap(cold, pulled))


def _gap(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    best = max(one, key=lambda token: one[token])
    if best in other:
        return abs(one[best] - other[best])
    return max(0.0, one[best] - _most_of_others(other))


def _most_of_others(listed: Mapping[str, float]) -> float:
    """What a token that is not listed can have at most, in nats.

    That is what the others leave, and no more than the last of the best has. vLLM adds the token
    that was drawn, which may be a worse one: so the last but one bounds it.
    """
    left = 1.0 - math.fsum(math.exp(value) for value in listed.values())
    rest = math.log(left) if left > 0.0 else -math.inf
    return min([rest, *sorted(listed.values())[1:2]])


def first_token_logprobs(api: Api, body: bytes) -> dict[str, float]:
    """Tokens and log-probabilities at an answer's first position.

    Raises ValueError if the answer has none.
    """
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
        said = answer["choices"][0]["logprobs"]
        if api is Api.CHAT:
            listed = said["content"][0]["top_logprobs"]
            return {entry["token"]: float(entry["logprob"]) for entry in listed}
        return {token: float(value) for token, value in said["top_logprobs"][0].items()}
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no log-probabilities in the answer: {error!r}") from error


@dataclass(slots=True)
class Canary:
    """Samples, compares, and switches a pair of engines off."""

    share: float
    """Of pulled turns; 0 is off."""
    tolerance: float
    """Nats that kernels, batches and bfloat16 may make of difference."""
    client: EngineClient
    pairs: Pairs
    metrics: Metrics
    _mild: dict[tuple[str, str], deque[bool]] = field(default_factory=dict)
    _running: asyncio.Task[None] | None = None
    _engines: tuple[str, ...] = ()
    """Prefill and decode node of the check that is running."""

    def wants(self, request_id: str) -> bool:
        """Whether this turn is in the sample; the same for the same id."""
        if self.share <= 0:
            return False
        drawn = hashlib.blake2b(request_id.encode(), digest_size=4).digest()
        return int.from_bytes(drawn, "little") < self.share * 2**32

    def asked_of_p(self, request: TurnRequest) -> dict[str, Any]:
        """Fields that make P say how likely it found its token; none if it is not in the sample."""
        if not self.wants(request.request_id):
            return {}
        if request.api is Api.CHAT:
            return {**_ASKED_OF_BOTH, "logprobs": True, "top_logprobs": TOP_TOKENS}
        return {**_ASKED_OF_BOTH, "logprobs": TOP_TOKENS}

    def soon(
        self,
        request: TurnRequest,
        prompt: ProvenPrompt | None,
        pulled: bytes,
        prefill: str,
        decode: str,
    ) -> None:
        """Compare ``pulled``, the body of P's answer, with a cold run, if it is in the sample.

        Dropped if one is going on already.
        """
        if prompt is None or not self.wants(request.request_id):
            return
        if self._running is not None and not self._running.done():
            self.metrics.canary_checks.labels(outcome="dropped").inc()
            return
        work = self._check(request, prompt.ids, pulled, prefill, decode)
        self._engines = (prefill, decode)
        self._running = asyncio.get_running_loop().create_task(work)

    def restarted(self, engine: str) -> None:
        """What was seen of an engine's earlier life says nothing of this one."""
        self._mild = {names: seen for names, seen in self._mild.items() if engine not in names}
        if self._running is not None and engine in self._engines:
            self._running.cancel()

    async def close(self) -> None:
        """End a check that is going on."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _check(
        self, request: TurnRequest, prompt: PromptIds, pulled: bytes, prefill: str, decode: str
    ) -> None:
        try:
            cold = await self._cold(request, prompt, prefill)
            apart = divergence(
                first_token_logprobs(request.api, pulled),
                first_token_logprobs(Api.COMPLETIONS, cold),
            )
        except (EngineError, ValueError) as error:
            logger.info("canary: nothing to compare for turn %s: %s", request.request_id, error)
            self.metrics.canary_checks.labels(outcome="failed").inc()
            return
        self._judge(apart, request.request_id, prefill, decode)

    async def _cold(self, request: TurnRequest, prompt: PromptIds, prefill: str) -> bytes:
        body = {
            **_ASKED_OF_BOTH,
            "model": request.model,
            "prompt": prompt.raw,
            "max_tokens": 1,
            "logprobs": TOP_TOKENS,
            "cache_salt": CANARY_SALT + secrets.token_hex(16),
        }
        reply = await self.client.post(
            prefill,
            Api.COMPLETIONS.value,
            msgspec.json.encode(body),
            request.engine_headers,
            timeout_s=_TIMEOUT_S,
        )
        if reply.status != 200:
            raise ValueError(f"{prefill} answered {reply.status} to the cold run")
        return reply.body

    def _judge(self, apart: float, request_id: str, prefill: str, decode: str) -> None:
        seen = self._mild.setdefault((prefill, decode), deque(maxlen=_REMEMBERED))
        seen.append(apart > self.tolerance)
        if apart <= self.tolerance:
            self.metrics.canary_checks.labels(outcome="agreed").inc()
            return
        self.metrics.canary_checks.labels(outcome="diverged").inc()
        logger.error(
            "canary: turn %s: what %s read from %s gives other tokens than computing (%.2f nats)",
            request_id,
            prefill,
            decode,
            apart,
        )
        if apart > _GROSS * self.tolerance or sum(seen) > _MILD_ALLOWED:
            self.pairs.switch_off(prefill, decode, f"canary: {apart:.2f} nats apart")
            seen.clear()
