"""Worlds side by side in several processes, until there were enough turns or one has failed."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from tests.machine.run import STEPS_PER_WORLD, Failure, attempt
from tests.machine.world import Tally


@dataclass
class Found:
    """What a search came to."""

    tally: Tally = field(default_factory=Tally)
    worlds: int = 0
    failure: Failure | None = None
    seconds: float = 0.0


def one_world(seed: int) -> Tally | Failure:
    """All steps of a world."""
    return attempt(seed, list(range(STEPS_PER_WORLD)))


def search(seed: int, turns: int, max_worlds: int | None, jobs: int, *, says: bool = True) -> Found:
    """Run worlds from ``seed`` on. Progress goes to stderr."""
    found, began_s = Found(), time.monotonic()
    said_s, seeds = began_s, itertools.count(seed)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = {pool.submit(one_world, next(seeds)) for _ in range(jobs * 2)}
        while running and not _is_enough(found, turns, max_worlds):
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                if isinstance(result, Failure):
                    found.failure = found.failure or result
                    continue
                found.tally.add(result)
                found.worlds += 1
                running.add(pool.submit(one_world, next(seeds)))
            if says and time.monotonic() > said_s + 10:
                said_s = time.monotonic()
                progress = f"  {found.tally.turns:,} turns in {found.worlds} worlds"
                print(progress, file=sys.stderr, flush=True)
        pool.shutdown(wait=True, cancel_futures=True)
    found.seconds = time.monotonic() - began_s
    return found


def _is_enough(found: Found, turns: int, max_worlds: int | None) -> bool:
    if found.failure is not None:
        return True
    if max_worlds is not None:
        return found.worlds >= max_worlds
    return found.tally.turns >= turns


def report(found: Found) -> None:
    """What the run has seen."""
    tally = found.tally
    print(
        f"{tally.turns:,} turns in {found.worlds} worlds, {tally.right:,} right answers, "
        f"{found.seconds:.0f} s"
    )
    for name in ("routes", "whys", "statuses", "steps"):
        seen = ", ".join(f"{key} {count:,}" for key, count in getattr(tally, name).most_common())
        print(f"  {name}: {seen}")
