"""``python -m tests.machine``: run the machine with seeds of your own."""

from __future__ import annotations

import argparse
import os
import sys

from tests.machine.run import Failure, attempt, shrink
from tests.machine.search import report, search


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.machine", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first world")
    parser.add_argument("--turns", type=int, default=100_000, help="at least so many")
    parser.add_argument("--worlds", type=int, help="exactly so many worlds, whatever the turns")
    parser.add_argument("--steps", help="only these steps of one world, with commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-shrink", action="store_true", help="show a failure as it was found")
    return parser.parse_args()


def main() -> int:
    """0 if every invariant held."""
    options = _arguments()
    if options.steps:
        steps = [int(number) for number in options.steps.split(",")]
        result = attempt(options.seed, steps)
        print(result)
        return int(isinstance(result, Failure))
    found = search(options.seed, options.turns, options.worlds, options.jobs)
    report(found)
    if found.failure is None:
        return 0
    print(found.failure if options.no_shrink else shrink(found.failure))
    return 1


if __name__ == "__main__":
    sys.exit(main())
