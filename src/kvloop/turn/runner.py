"""One turn: render, plan, P leg, D leg, file. The order of things, and who cleans up after whom."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloop.engines.client import EngineError, EngineTimeoutError
from kvloop.engines.fleet import serving
from kvloop.engines.sse import EventTooLargeError
from kvloop.observe.receipt import Receipt
from kvloop.policy.route import Append, Claim, NoUsableNodeError, Pull
from kvloop.turn.answer_stream import AnswerEnd, AnswerStream, take_from_body
from kvloop.turn.attachment import Attachment
from kvloop.turn.decode_leg import open_decode
from kvloop.turn.errors import EngineRefusedError, TurnFailedError
from kvloop.turn.filing import file_reference
from kvloop.turn.plan import Plan, ProvenPrompt, make_plan
from kvloop.turn.prefill_leg import Prefilled, run_prefill
from kvloop.turn.render import render
from kvloop.turn.slots import slot

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from kvloop.engines.client import StreamReply
    from kvloop.engines.fleet import Engine
    from kvloop.turn.request import TurnRequest
    from kvloop.turn.services import Services


@dataclass(frozen=True, slots=True)
class Answer:
    """D's answer, ready to be passed on."""

    status: int
    content_type: str
    route: str
    """Value of ``x-kvloop-route``."""
    body: bytes | None = None
    """The whole answer; None if it comes in :attr:`chunks`."""
    chunks: AsyncIterator[bytes] | None = None
    """The answer's events as they come."""


class TurnRunner:
    """Serves turns; holds nothing of any one of them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._numbers = itertools.count()

    @asynccontextmanager
    async def serve(self, request: TurnRequest) -> AsyncGenerator[Answer]:
        """Run one turn; leaving the context early cancels what is still running on engines.

        Raises EngineRefusedError or TurnFailedError before there is an answer; the answer's
        chunks raise EngineError when D breaks off.
        """
        receipt = Receipt(request_id=request.request_id, api=request.api.label)
        metrics = self._services.metrics
        with metrics.in_flight.track_inprogress():
            try:
                async with self._answer(request, receipt) as answer:
                    receipt.status = answer.status
                    yield answer
            except EngineRefusedError as error:
                receipt.status, receipt.failure = error.reply.status, "engine_refused"
                raise
            except TurnFailedError as error:
                receipt.status, receipt.failure = error.status, str(error)
                raise
            except EngineError as error:
                receipt.failure = str(error)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                receipt.failure = "client_gone"
                raise
            finally:
                receipt.write()
                metrics.turns.labels(receipt.api, receipt.route, receipt.why).inc()

    @asynccontextmanager
    async def _answer(self, request: TurnRequest, receipt: Receipt) -> AsyncGenerator[Answer]:
        services = self._services
        turn_number = next(self._numbers)
        prefills = serving(services.fleet.prefills, request.model, services.clock())
        decodes = serving(services.fleet.decodes, request.model, services.clock())
        prompt = await self._render(request, prefills, turn_number)
        try:
            plan = make_plan(
                request,
                prompt,
                turn_number=turn_number,
                prefills=prefills,
                decodes=decodes,
                ledger=services.ledger,
                pairs=services.pairs,
                policy=services.policy,
                now_s=services.clock(),
            )
        except NoUsableNodeError as error:
            raise TurnFailedError(503, f"Cannot serve: {error}.", retry_after_s=1) from error
        _note_plan(receipt, plan, request, prompt)
        ordered = sorted(decodes, key=lambda engine: engine.url != plan.route.decode)
        async with AsyncExitStack() as held:
            with Attachment(plan.claimed, services) as attachment:
                # D's place first: what P keeps for D must not wait for D.
                await held.enter_async_context(slot(ordered[0], services))
                prefilled = await self._prefill(
                    request, prompt, plan, attachment, prefills, receipt
                )
            ends_s = services.clock() + services.timeouts.decode_s
            leg = open_decode(request, prompt, prefilled, ordered, receipt, services)
            decode, reply = await held.enter_async_context(leg)

            def file(end: AnswerEnd) -> None:
                sure = prompt
                if (
                    prompt
                    and prefilled
                    and not prompt.is_what_was_computed(prefilled.prompt_tokens)
                ):
                    sure = None
                receipt.filed = file_reference(
                    request, sure, decode, end, plan.supersedes, services
                )

            yield await self._pass_on(request, decode, reply, ends_s, receipt, file)

    async def _render(
        self, request: TurnRequest, prefills: Sequence[Engine], turn_number: int
    ) -> ProvenPrompt | None:
        if request.without_reuse is not None or request.without_prefill is not None:
            return None
        renders = serving(self._services.fleet.renders, None, self._services.clock())
        can_render = [engine for engine in prefills if engine.facts and engine.facts.renders]
        return await render(request, renders or can_render, turn_number, self._services)

    async def _prefill(
        self,
        request: TurnRequest,
        prompt: ProvenPrompt | None,
        plan: Plan,
        attachment: Attachment,
        prefills: Sequence[Engine],
        receipt: Receipt,
    ) -> Prefilled | None:
        if isinstance(plan.route, Append):
            return None
        started_s = self._services.clock()
        prefilled = await run_prefill(
            request, prompt, plan, attachment, prefills, receipt, self._services
        )
        receipt.prefill_s = self._services.clock() - started_s
        _note_prefill(receipt, prefilled, plan, self._services)
        if prompt is not None and prompt.is_what_was_computed(prefilled.prompt_tokens):
            prefilled.engine.residency.served(prompt.prefixes)
        return prefilled

    async def _pass_on(
        self,
        request: TurnRequest,
        decode: Engine,
        reply: StreamReply,
        ends_s: float,
        receipt: Receipt,
        file: Callable[[AnswerEnd], None],
    ) -> Answer:
        """D's answer without what is only for the router; files the reference once it is read."""
        if reply.status != 200:
            raise EngineRefusedError(await reply.whole())
        if reply.content_type.startswith("text/event-stream"):
            events = self._events(decode, reply, ends_s, receipt, file)
            return Answer(reply.status, reply.content_type, receipt.header, chunks=events)
        body, end = await self._whole(request, decode, reply, ends_s)
        file(end)
        return Answer(reply.status, reply.content_type, receipt.header, body=body)

    async def _whole(
        self, request: TurnRequest, decode: Engine, reply: StreamReply, ends_s: float
    ) -> tuple[bytes, AnswerEnd]:
        services = self._services
        try:
            async with asyncio.timeout(ends_s - services.clock()):
                whole = await reply.whole()
        except (EngineError, TimeoutError) as error:
            decode.breaker.failed(services.clock())
            if isinstance(error, TimeoutError):
                raise EngineTimeoutError(decode.url, "took too long to answer") from error
            raise
        keep_ids = bool(request.body.get("return_token_ids"))
        return take_from_body(whole.body, keep_token_ids=keep_ids)

    async def _events(
        self,
        decode: Engine,
        reply: StreamReply,
        ends_s: float,
        receipt: Receipt,
        file: Callable[[AnswerEnd], None],
    ) -> AsyncIterator[bytes]:
        stream = AnswerStream()
        filed = False
        try:
            async for data in self._in_time(decode, reply, ends_s):
                events = stream.feed(data)
                if not filed and stream.end.params is not None:
                    # Before the client sees the end: its next turn may follow at once.
                    file(stream.end)
                    filed = True
                if events:
                    yield events
        except (EngineError, EventTooLargeError) as error:
            receipt.failure = str(error)
            decode.breaker.failed(self._services.clock())
            raise
        rest = stream.finish()
        if not filed:
            file(stream.end)
        if rest:
            yield rest

    async def _in_time(
        self, decode: Engine, reply: StreamReply, ends_s: float
    ) -> AsyncIterator[bytes]:
        """D's bytes. Raises EngineTimeoutError when they begin late or go on after ``ends_s``.

        Silence in between is the client's business (:class:`EngineClient`), so an answer that goes
        on for too long is noticed with its next byte.
        """
        clock, chunks = self._services.clock, reply.chunks()
        try:
            async with asyncio.timeout(self._services.timeouts.first_byte_s):
                data = await anext(chunks, None)
        except TimeoutError as error:
            raise EngineTimeoutError(decode.url, "did not begin to answer in time") from error
        while data is not None:
            if clock() > ends_s:
                raise EngineTimeoutError(decode.url, "took too long to answer")
            yield data
            data = await anext(chunks, None)


def _note_plan(
    receipt: Receipt, plan: Plan, request: TurnRequest, prompt: ProvenPrompt | None
) -> None:
    route = plan.route
    receipt.route, receipt.why, receipt.decode = route.kind, route.why, route.decode
    if not isinstance(route, Append):
        receipt.prefill = route.prefill
        if prompt is None:
            receipt.why = request.without_reuse or "tokens_unknown"
    receipt.prompt_tokens = len(prompt.ids) if prompt is not None else None


def _note_claim(receipt: Receipt, prefilled: Prefilled, services: Services) -> None:
    """What P asked for and got; a claim that got nothing was a recompute."""
    report = prefilled.claim
    if report is None:
        receipt.route, receipt.why = "recompute", "claim_not_reported"
        return
    receipt.claimed_tokens = report.asked_tokens
    receipt.pulled_tokens = report.granted_tokens
    services.metrics.claims.labels(outcome=report.why).inc()
    if report.granted_tokens == 0:
        receipt.route, receipt.why = "recompute", f"claim_{report.why}"


def _note_prefill(receipt: Receipt, prefilled: Prefilled, plan: Plan, services: Services) -> None:
    receipt.prefill = prefilled.engine.url
    receipt.prompt_tokens = prefilled.prompt_tokens or receipt.prompt_tokens
    cached, total = prefilled.cached_tokens, receipt.prompt_tokens
    if cached is None or total is None:
        return
    receipt.computed_tokens = total - cached
    tokens = services.metrics.tokens
    if receipt.route == "pull" and isinstance(plan.route, Pull):
        # P reads what its own cache lacks; how much that had, only its metrics say.
        receipt.pulled_tokens = min(cached, plan.route.num_tokens)
    if receipt.route == "pull" and isinstance(plan.route, Claim):
        _note_claim(receipt, prefilled, services)
    tokens.labels(source="pulled").inc(receipt.pulled_tokens)
    tokens.labels(source="cached").inc(cached - receipt.pulled_tokens)
    tokens.labels(source="computed").inc(receipt.computed_tokens)
