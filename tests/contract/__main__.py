"""``python -m tests.contract``: run the script, print what was seen beside what is recorded."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from kvloop.cluster import LocalCluster, prepare_model
from kvloop.cluster.layout import share_cores
from tests.contract.engines import doubles, real, specs
from tests.contract.recording import read, write
from tests.contract.script import Seen, Step, differences, run
from tests.contract.steps import STEPS
from tests.contract.target import Target


def report(line: str, _start_s: float = time.monotonic()) -> None:
    print(f"{time.monotonic() - _start_s:6.1f} s  {line}", flush=True)


Told = dict[str, Seen]


async def drive(target: Target, steps: list[Step], seen: Told) -> None:
    async for name, what in run(target, steps):
        seen[name] = what
        report(f"{len(seen):2} of {len(steps)}  {name}")


async def on_double(steps: list[Step], seen: Told) -> None:
    async with doubles() as target:
        await drive(target, steps, seen)


async def on_engines(steps: list[Step], seen: Told) -> None:
    model = prepare_model(None, print)
    cores = share_cores(sorted(os.sched_getaffinity(0)), 2)
    logs = Path(tempfile.mkdtemp(prefix="kvloop-contract-"))
    print(f"logs are in {logs}")
    async with LocalCluster(specs(model, *cores), logs, report) as cluster, real(cluster) as target:
        await drive(target, steps, seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", action="store_true", help="real vLLM, not the double")
    parser.add_argument("--record", action="store_true", help="write down what real vLLM does")
    parser.add_argument("--only", nargs="*", help="names of steps")
    options = parser.parse_args()
    steps = [step for step in STEPS if not options.only or step.__name__ in options.only]
    seen: Told = {}
    driver = on_engines if options.engines or options.record else on_double
    try:
        asyncio.run(driver(steps, seen))
    finally:
        if options.record:
            write(seen)
    recorded = {name: what for name, what in read().items() if name in seen}
    found = differences(recorded, seen)
    for name, (expected, got) in found.items():
        print(f"DIFFERS {name}\n  recorded {expected}\n  seen     {got}")
    print(f"{len(seen)} steps, {len(found)} observations differ from the recording")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
