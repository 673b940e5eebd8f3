"""Runs worlds, shrinks what fails, and says how to see it again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from tests.machine import virtual_time
from tests.machine.world import Tally, World

STEPS_PER_WORLD = 400


@dataclass
class Failure:
    """A world that broke an invariant."""

    seed: int
    steps: list[int]
    num_steps: int
    error: BaseException

    def __str__(self) -> str:
        shown = ",".join(map(str, self.steps))
        if len(self.steps) == self.num_steps:
            return (
                f"seed {self.seed}: {type(self.error).__name__}: {self.error}\n"
                f"again: python -m tests.machine --seed {self.seed} --worlds 1"
            )
        return (
            f"seed {self.seed}: {type(self.error).__name__}: {self.error}\n"
            f"again: python -m tests.machine --seed {self.seed} --worlds 1 --steps {shown}"
        )


def run_world(seed: int, steps: list[int], num_steps: int = STEPS_PER_WORLD) -> Tally:
    """One world, from its beginning to its end. Raises whatever it broke with."""

    async def main() -> Tally:
        world = World(seed, asyncio.get_running_loop())
        await world.live(steps, num_steps)
        return world.tally

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return virtual_time.run(main())
    finally:
        logging.disable(before)


def attempt(seed: int, steps: list[int], num_steps: int = STEPS_PER_WORLD) -> Tally | Failure:
    """As :func:`run_world`, with failures as values."""
    try:
        return run_world(seed, steps, num_steps)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return Failure(seed, steps, num_steps, error)


def shrink(failure: Failure, tries: int = 200) -> Failure:
    """Leave out steps for as long as it still fails in the same way (ddmin, Zeller 2002)."""
    kind, best, chunk = _kind(failure.error), failure, max(1, len(failure.steps) // 2)
    while chunk >= 1 and tries > 0:
        start, smaller = 0, False
        while start < len(best.steps) and tries > 0:
            steps = best.steps[:start] + best.steps[start + chunk :]
            tries -= 1
            again = attempt(best.seed, steps, best.num_steps)
            if isinstance(again, Failure) and _kind(again.error) == kind:
                best, smaller = again, True
            else:
                start += chunk
        chunk = chunk if smaller and chunk > 1 else chunk // 2
    return best


def _kind(error: BaseException) -> str:
    """What sort of failure: its type and the words without the particulars."""
    words = str(error).partition(": ")[2] or str(error)
    return f"{type(error).__name__} {''.join(c for c in words[:25] if not c.isdigit())}"
