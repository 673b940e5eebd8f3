"""`kvloop demo`: see the loop close on this machine."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from typing import Any

_DEFAULT_TURNS = 6


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="run a real conversation on real engines, with and without reuse",
        description="Start a prefill node, a decode node and the router on this machine, run a "
        "multi-turn conversation with reuse off and on, and print what it did to TTFT.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--turns", type=int, default=_DEFAULT_TURNS, help="turns (default: 6)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where engine logs go")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 if all answers agreed."""
    try:
        from rich.console import Console

        from kvloop.cluster import EngineStartError, ModelUnavailableError
        from kvloop.demo.run import run_demo
    except ModuleNotFoundError as error:
        print(
            f"kvloop: the demo needs {error.name}; run `make demo`, or "
            f"`pip install 'kvloop[demo]'` where vLLM is installed",
            file=sys.stderr,
        )
        return 1
    if options.turns < 1:
        print("kvloop: --turns must be at least 1", file=sys.stderr)
        return 2
    logs = options.logs or Path(tempfile.mkdtemp(prefix="kvloop-demo-"))
    try:
        figures = asyncio.run(_until_signalled(run_demo(Console(), logs, options.turns)))
    except (EngineStartError, ModelUnavailableError) as error:
        print(f"kvloop: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("kvloop: stopped; nothing is left running", file=sys.stderr)
        return 130
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if not all(turn["identical"] for turn in figures["turns"]):
        print("kvloop: answers with and without reuse differ", file=sys.stderr)
        return 1
    return 0


async def _until_signalled(job: Any) -> Any:
    """Run ``job``; SIGTERM and Ctrl-C cancel it, so that what it started is stopped."""
    task = asyncio.ensure_future(job)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, task.cancel)
    return await task
