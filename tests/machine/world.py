"""One world: engines, a router, clients, faults, and the invariants that hold after every step.

Everything random comes from the seed, each step's from its own, so a run without some of its steps
is still the same in the others: failures can be made smaller by leaving steps out.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvloop.config import Settings
from kvloop.engines.client import EngineError
from kvloop.engines.sse import EventTooLargeError
from kvloop.gateway.app import Router
from kvloop.ledger.pins import PinState
from kvloop.turn.errors import EngineRefusedError, TurnFailedError
from kvloop.turn.request import BadRequestError, read_request
from kvloop.turn.runner import TurnRunner
from tests.double.engine import Engine, Fabric
from tests.double.in_process import InProcessClient
from tests.double.sampler import Style
from tests.machine import clients
from tests.machine.clients import Conversation, Identity, Model, Turn

TTL_S = 120.0
MARGIN_S = 15.0
LONGEST_TURN_S = 900.0
"""More than all the router's timeouts of one turn together."""
RECOVERY_S = 90.0
"""After the last fault: breakers' pauses, probes, and what was under way."""
STYLES = (
    Style(ends=61),
    Style(ends=61, pairs=True),
    Style(ends=61, thinks=True),
    Style(ends=61, calls_tools=True),
    Style(ends=61, thinks=True, calls_tools=True),
)


class BrokenInvariantError(Exception):
    """What must never happen has happened."""


@dataclass
class Tally:
    """What a run has seen, to show that it saw something."""

    turns: int = 0
    right: int = 0
    routes: Counter[str] = field(default_factory=Counter)
    whys: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.turns += other.turns
        self.right += other.right
        for mine, theirs in (
            (self.routes, other.routes),
            (self.whys, other.whys),
            (self.statuses, other.statuses),
            (self.steps, other.steps),
        ):
            mine.update(theirs)


class World:
    """See the module."""

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self.seed, self.loop = seed, loop
        chance = random.Random(f"world {seed}")
        self.chance = chance
        self.model = Model(
            style=chance.choice(STYLES),
            strips_reasoning=chance.random() < 0.5,
            parses_output=chance.random() < 0.5,
            stamps=chance.random() < 0.1,
        )
        self.fabric = Fabric(source=loop.time)
        delays = random.Random(f"delays {seed}")
        self.client = InProcessClient(lambda: delays.choice([0.0, 0.0, 0.001, 0.02, 0.3]))
        claims = chance.random() < 0.15
        self.prefills = [
            self._engine(f"http://p{n}", claims=claims) for n in range(chance.randint(1, 3))
        ]
        self.decodes = [
            self._engine(f"http://d{n}", claims=claims) for n in range(chance.randint(1, 3))
        ]
        self.settings = Settings(
            prefill=tuple(f"http://p{n}" for n in range(len(self.prefills))),
            decode=tuple(f"http://d{n}" for n in range(len(self.decodes))),
            fingerprint_secret="the same one in every run",
            kv_ttl_s=TTL_S,
            deadline_margin_s=MARGIN_S,
            pin_budget=chance.choice([0.2, 0.4, 0.8]),
            max_references=chance.choice([5, 40, 100_000]),
            threshold_tokens=chance.choice([1, 16, 64]),
            prefill_timeout_s=60.0,
            pull_timeout_s=chance.choice([5.0, 20.0]),
            first_byte_timeout_s=60.0,
            silence_timeout_s=60.0,
            decode_timeout_s=300.0,
            queue_timeout_s=60.0,
            prefill_concurrency=chance.choice([1, 4, 256]),
            decode_concurrency=chance.choice([4, 256]),
            check_releases=chance.random() < 0.2,
        )
        self.router = Router(self.settings, clock=loop.time, client=self.client)
        self.runner = TurnRunner(self.router.services)
        self.conversations: list[Conversation] = []
        self.running: set[asyncio.Task[None]] = set()
        self.identities: dict[str, Identity | str] = {}
        """Of each turn, by request id; the release check's turns have none."""
        self.unfinished: set[str] = set()
        """Turns whose client did not get the whole answer: what D pinned then, nobody was told."""
        self.disturbed_until_s = 0.0
        self.down: dict[str, float] = {}
        """Engines that are down, and when they come back."""
        self.tally = Tally()
        self._request_numbers = 0
        self._handovers_seen = 0
        self._reads: Counter[tuple[str, str]] = Counter()
        self._broken: BaseException | None = None

    def _engine(self, url: str, *, claims: bool) -> Engine:
        chance = self.chance
        is_decode = url.startswith("http://d")
        num_blocks, plugin = chance.choice([90, 200, 1000]), chance.random() < 0.85
        is_native = chance.random() < 0.3
        if not plugin and not is_native:
            # What streams leave pinned there, no router can know: as without one, room must do.
            num_blocks = 20_000
        engine = Engine(
            self.fabric,
            num_blocks=num_blocks,
            prefix_caching=is_decode or chance.random() < 0.6,
            plugin=plugin,
            # Some pin for shorter than the router was told: their references are refused.
            ttl_s=chance.choice([TTL_S, TTL_S, TTL_S / 4]),
        )
        engine.adapters = set(clients.ADAPTERS)
        engine.claims = claims
        engine.clock_ahead_s = chance.uniform(-500, 1e6)
        engine.cut_stream = _cutter(chance) if chance.random() < 0.3 else engine.cut_stream
        # On P it would spoil P to D, which is not ours to mend.
        engine.extra_exported_blocks = chance.choice([0, 0, 0, 1]) if is_decode else 0
        engine.kv_recompute_threshold = chance.choice([0, 16, 64])
        engine.ignores_ids = engine.renders_differently = self.model.stamps
        engine.lease_s = 30.0
        engine.native_stream_reference = is_native
        engine.parses_output = self.model.parses_output
        engine.poll_s = 0.5
        engine.renders_tools = True
        engine.strips_reasoning = self.model.strips_reasoning
        engine.style = self.model.style
        engine.token_delay_s = chance.choice([0.0, 0.0, 0.01, 0.05])
        self.client.serve(url, engine)
        return engine

    @property
    def engines(self) -> list[tuple[str, Engine]]:
        named = [(f"http://p{n}", engine) for n, engine in enumerate(self.prefills)]
        return named + [(f"http://d{n}", engine) for n, engine in enumerate(self.decodes)]

    # --- steps -----------------------------------------------------------------------------------

    async def live(self, steps: list[int], num_steps: int) -> None:
        """Run ``steps`` (numbers below ``num_steps``), then end in peace."""
        try:
            async with self.router.running():
                await self._until_ready()
                for number in steps:
                    await self._step(number, num_steps)
                    self._raise()
                await self._settle()
        except* BrokenInvariantError as broken:
            raise broken.exceptions[0] from None
        self._check_the_end()

    async def _until_ready(self) -> None:
        """Until the router has looked at all engines, as clients wait for ``/ready``."""
        fleet = self.router.services.fleet
        while not all(engine.usable for engine in [*fleet.prefills, *fleet.decodes]):
            await asyncio.sleep(0.1)

    async def _step(self, number: int, num_steps: int) -> None:
        chance = random.Random(f"step {self.seed} {number}")
        await self._revive_who_is_due()
        # Storms and calms take turns, so that what must hold in calm weather is tested too.
        is_storm = number * 6 // max(1, num_steps) % 2 == 1
        kind = chance.choices(
            ["turn", "pause", "fault", "settle", "idle"],
            [70, 20, 8 if is_storm else 0, 4, 1],
        )[0]
        self.tally.steps[kind] += 1
        match kind:
            case "turn":
                started = self._turns(chance)
                if chance.random() < 0.7:  # else more turns follow before this one has ended
                    await asyncio.wait(started, timeout=chance.choice([2.0, 30.0]))
            case "pause":
                await asyncio.sleep(chance.choice([0.01, 0.2, 1.0, 5.0, 20.0]))
            case "fault":
                self._fault(chance)
            case "settle":
                await self._settle()
            case "idle":
                await asyncio.sleep(chance.choice([100.0, 130.0, 1000.0]))

    def _turns(self, chance: random.Random) -> list[asyncio.Task[None]]:
        """A conversation's next turn; sometimes sent twice."""
        if not self.conversations or chance.random() < 0.15:
            self.conversations.append(clients.begin(chance))
            if len(self.conversations) > 25:
                del self.conversations[0]
        # Mostly the latest: a conversation's turns follow each other.
        latest = chance.random() < 0.6
        conversation = self.conversations[-1] if latest else chance.choice(self.conversations)
        if chance.random() < 0.15:
            clients.change(conversation, chance)
        started = []
        for _ in range(2 if chance.random() < 0.06 else 1):
            turn = clients.turn_of(conversation, chance)
            started.append(self._start(turn))
        if len(conversation.messages) > 9 or len(conversation.ids) > 300:
            self.conversations.remove(conversation)
        elif chance.random() < 0.8:
            clients.go_on(conversation, turn, self.model, chance)
        return started

    def _start(self, turn: Turn) -> asyncio.Task[None]:
        self._request_numbers += 1
        request_id = f"turn-{self._request_numbers}"
        task = self.loop.create_task(self._run(turn, request_id), name=request_id)
        self.running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = self._broken or task.exception()

    def _raise(self) -> None:
        for fault in self.client.faults:
            raise fault
        if self._broken is not None:
            raise self._broken

    async def _run(self, turn: Turn, request_id: str) -> None:
        """One turn as its client sees it, checked at its end."""
        self.identities[request_id] = turn.identity
        self.unfinished.add(request_id)
        started_s = self.loop.time()
        try:
            async with asyncio.timeout(turn.leaves_after_s or LONGEST_TURN_S):
                status, whole, streamed = await self._ask(turn, request_id)
        except TimeoutError:
            if turn.leaves_after_s is None:
                raise BrokenInvariantError(f"{request_id} hangs: {turn}") from None
            return
        self.tally.turns += 1
        self.tally.statuses[status] += 1
        if status == 200 and b'data: {"error"' not in whole:
            self.unfinished.discard(request_id)
            wrong = clients.fault_of(turn, self.model, whole, streamed=streamed)
            if wrong is not None:
                raise BrokenInvariantError(f"{request_id}: wrong answer: {wrong}; {turn}")
            self.tally.right += 1
        else:
            self._check_failure(turn, request_id, status, whole, started_s)

    async def _ask(self, turn: Turn, request_id: str) -> tuple[int, bytes, bool]:
        """Status, body, whether it was streamed; failures as the gateway would put them."""
        try:
            request = read_request(
                turn.identity.api,
                json.dumps(turn.body).encode(),
                request_id=request_id,
                tenant=turn.identity.tenant,
                reuse=turn.reuse,
                is_last=turn.is_last,
                engine_headers={"x-request-id": request_id},
            )
            async with self.runner.serve(request) as answer:
                self.tally.routes[answer.route.partition(";")[0]] += 1
                self.tally.whys[answer.route.rpartition("=")[2]] += 1
                if answer.body is not None:
                    return answer.status, answer.body, False
                assert answer.chunks is not None
                whole = b""
                try:
                    async for chunk in answer.chunks:
                        whole += chunk
                except (EngineError, EventTooLargeError) as error:
                    whole += f'\n\ndata: {{"error": "{error}"}}\n\n'.encode()
                return answer.status, whole, True
        except EngineRefusedError as error:
            return error.reply.status, error.reply.body, False
        except TurnFailedError as error:
            return error.status, str(error).encode(), False
        except BadRequestError as error:
            return 400, str(error).encode(), False
        except EngineError as error:
            return 502, str(error).encode(), False

    def _fault(self, chance: random.Random) -> None:
        url, engine = chance.choice(self.engines)
        kind = chance.choice(
            ["kill", "restart", "refuse", "break", "late", "hold", "break_stream", "pause_stream"]
        )
        self.tally.steps[kind] += 1
        lasts_s = 0.0
        match kind:
            case "kill" if url not in self.down:
                lasts_s = chance.choice([0.5, 4.0, 30.0])
                self.client.kill(url)
                self.down[url] = self.loop.time() + lasts_s
            case "restart" if url not in self.down:
                for _ in range(chance.choice([1, 2])):
                    self.client.kill(url)
                    self.client.revive(url)
            case "refuse":
                lasts_s = 20.0
                engine.refuse_next = chance.choices([500, 503, 500, 502], k=chance.randint(1, 3))
                self.loop.call_later(lasts_s, engine.refuse_next.clear)
            case "break":
                lasts_s = 20.0
                engine.break_next = chance.randint(1, 2)
                self.loop.call_later(lasts_s, setattr, engine, "break_next", 0)
            case "late":
                lasts_s = chance.choice([1.0, 25.0])
                engine.answer_delay_s = lasts_s
                self.loop.call_later(lasts_s, setattr, engine, "answer_delay_s", 0.0)
            case "hold":
                # A D that does not even look at a request for longer than P's lease reads what P
                # has freed: for streams the router gives up before, for others nobody can know.
                lasts_s = chance.choice([3.0, 20.0 if engine in self.decodes else 70.0])
                hold = engine.hold = asyncio.Event()
                self.loop.call_later(lasts_s, _let_go, engine, hold)
            case "break_stream":
                engine.break_stream_after = chance.randrange(8)
                lasts_s = 2.0
                self.loop.call_later(lasts_s, setattr, engine, "break_stream_after", None)
            case "pause_stream":
                engine.pause_stream_after = chance.randrange(8)
                lasts_s = 2.0
                self.loop.call_later(lasts_s, setattr, engine, "pause_stream_after", None)
        self._disturb(lasts_s)

    def _disturb(self, lasts_s: float) -> None:
        until_s = self.loop.time() + lasts_s + RECOVERY_S
        self.disturbed_until_s = max(self.disturbed_until_s, until_s)

    async def _revive_who_is_due(self, *, all_of_them: bool = False) -> None:
        for url, when_s in [*self.down.items()]:
            if all_of_them or when_s <= self.loop.time():
                self.client.revive(url)
                del self.down[url]
                self._disturb(0.0)

    async def _settle(self) -> None:
        """Nothing new until everything has ended; then look at what is left."""
        await self._revive_who_is_due(all_of_them=True)
        for _, engine in self.engines:
            engine.refuse_next, engine.break_next = [], 0
        while self.running:
            await asyncio.wait(self.running)
            self._raise()
        # Probes, releases, and time enough for what D frees on its own clock a little earlier.
        await asyncio.sleep(12.0)
        await self.router.services.orphans.settle()
        await self.router.services.releases.settle()
        self._check()

    # --- invariants ------------------------------------------------------------------------------

    def _check_failure(
        self, turn: Turn, request_id: str, status: int, whole: bytes, started_s: float
    ) -> None:
        """Never worse: in calm weather nothing fails; what fails is well-formed."""
        if status == 400 and "kv_transfer_params" not in turn.body:
            raise BrokenInvariantError(f"{request_id}: refused: {whole!r}; {turn}")
        if started_s > self.disturbed_until_s:
            raise BrokenInvariantError(
                f"{request_id}: {status} {whole[-300:]!r} though no engine fails; {turn}"
            )
        if status not in (200, 500, 502, 503, 504):
            raise BrokenInvariantError(f"{request_id}: status {status}; {turn}")

    def _check(self) -> None:
        self._check_engines()
        self._check_handovers()
        for number in range(len(self.decodes)):
            self._check_pins(number)

    def _check_engines(self) -> None:
        for url, engine in self.engines:
            if engine.dead and url not in self.down:
                raise BrokenInvariantError(f"{url} died of a request")
            if engine.memory.poisoned:
                raise BrokenInvariantError(f"{url} has cached wrong KV")
            if engine.running or engine.num_waiting:
                raise BrokenInvariantError(f"{url} still works for nobody")
            leaked = [pin for pin in engine.memory.pins.values() if not pin.tracked]
            if leaked:
                raise BrokenInvariantError(f"{url} has leaked {leaked}")

    def _check_handovers(self) -> None:
        """Every reference is read once, and for the identity that it was made for."""
        for handover in self.fabric.handovers[self._handovers_seen :]:
            if not handover.was_pinned:
                raise BrokenInvariantError(f"read after it was freed: {handover}")
            read = (handover.producer, handover.request_id)
            self._reads[read] += 1
            if self._reads[read] > 1:
                raise BrokenInvariantError(f"read twice: {handover}")
            ours = self.identities.get(handover.produced_for)
            theirs = self.identities.get(handover.read_for)
            if ours != theirs:
                raise BrokenInvariantError(f"{handover}: KV of {ours} read for {theirs}")
        self._handovers_seen = len(self.fabric.handovers)

    def _check_pins(self, number: int) -> None:
        """What the router thinks that D pins is what D pins, within the budget."""
        services = self.router.services
        decode, engine = services.fleet.decodes[number], self.decodes[number]
        services.pins.expire(self.loop.time())
        engine.expire()
        known = [pin for pin in engine.memory.pins.values() if pin.origin not in self.unfinished]
        pinned = sum(len(pin.blocks) for pin in known) * engine.block_size
        accounted = services.pins.tokens(decode.url)
        if not engine.claims and _streams_references(engine) and pinned > accounted:
            raise BrokenInvariantError(f"{decode.url} pins {pinned}, accounted are {accounted}")
        kept = services.pins.tokens(decode.url, PinState.HELD, PinState.CLAIMED)
        budget = int(engine.num_blocks * engine.block_size * self.settings.pin_budget)
        if kept > budget:
            raise BrokenInvariantError(f"{decode.url}: {kept} kept, the budget is {budget}")
        if services.pins.tokens(decode.url, PinState.CLAIMED, PinState.LEAVING):
            raise BrokenInvariantError(f"{decode.url}: claimed or leaving when nothing runs")
        for entry in services.ledger._entries.values():
            reference = entry.reference
            if reference is None or reference.decode != decode.url:
                continue
            if reference.deadline_s <= self.loop.time():
                continue
            request_id = json.loads(reference.params)["remote_request_id"]
            if reference.engine_id != engine.engine_id:
                raise BrokenInvariantError(f"{decode.url}: a reference of an earlier life is kept")
            if request_id not in engine.memory.pins and engine.ttl_s == TTL_S:
                raise BrokenInvariantError(f"{decode.url}: {request_id} is kept, and not pinned")

    def _check_the_end(self) -> None:
        """The router is down: nothing that it knew of is pinned for it any more."""
        for url, engine in self.engines:
            left = [
                pin
                for pin in engine.memory.pins.values()
                if pin.origin not in self.unfinished
                and _streams_references(engine)
                and pin.ends_s > engine.now_s + MARGIN_S + 1.0  # else it has lapsed for the router
            ]
            if left and url.startswith("http://d"):
                raise BrokenInvariantError(f"{url} still pins {left} for a router that is gone")

    def receipt_of_state(self) -> dict[str, Any]:
        """For a failure's report."""
        return {
            "seed": self.seed,
            "time_s": self.loop.time(),
            "prefills": len(self.prefills),
            "decodes": len(self.decodes),
            "model": self.model,
            "settings": self.settings,
        }


def _streams_references(engine: Engine) -> bool:
    """Otherwise what streamed turns leave pinned, nobody can be told."""
    return engine.plugin or engine.native_stream_reference


def _let_go(engine: Engine, hold: asyncio.Event) -> None:
    hold.set()
    if engine.hold is hold:
        engine.hold = None


def _cutter(chance: random.Random) -> Any:
    """Cuts a stream into pieces of odd sizes."""
    size = chance.randint(1, 90)
    return lambda data: [data[at : at + size] for at in range(0, len(data), size)]
