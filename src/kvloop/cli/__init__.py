"""The `kvloop` command: one file per command, each with ``add_parser``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvloop import __version__
from kvloop.cli import demo, keys, serve

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by ``arguments`` (default: the process's); returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="kvloop",
        description="Give prefill nodes the history's KV back from decode nodes.",
    )
    parser.add_argument("--version", action="version", version=f"kvloop {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (serve, demo, keys):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code
