"""`kvloop serve`: the router."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from kvloop import config
from kvloop.gateway.server import serve_until_signalled

if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="run the router in front of your prefill and decode nodes",
        description="Run the router. Every flag is also a key of the TOML file and an environment "
        "variable KVLOOP_<KEY>.",
    )
    parser.add_argument("--config", type=Path, default=None, help="TOML file (or KVLOOP_CONFIG)")
    config.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop."""
    try:
        settings = read_settings(options)
    except config.ConfigError as error:
        print(f"kvloop: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        uvloop.run(serve_until_signalled(settings))
    except OSError as error:
        print(
            f"kvloop: cannot listen on {settings.host}:{settings.port}: {error.strerror}. "
            f"Choose another --port.",
            file=sys.stderr,
        )
        return 1
    return 0


def read_settings(options: argparse.Namespace) -> config.Settings:
    """Settings of the command line, the environment and the file. Raises ConfigError."""
    given = {name: value for name, value in vars(options).items() if name in config.FIELDS}
    environment_file = os.environ.get("KVLOOP_CONFIG")
    file = options.config or (Path(environment_file) if environment_file else None)
    settings = config.load(given, os.environ, file)
    settings.require_engines()
    return settings
