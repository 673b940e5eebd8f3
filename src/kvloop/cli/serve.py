"""`kvloop serve`: the router."""

from __future__ import annotations

import logging
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from kvloop import config
from kvloop.gateway.keys import KeyFileError
from kvloop.gateway.server import ListenError, serve_until_signalled

if TYPE_CHECKING:
    import argparse
    from typing import Any


logger = logging.getLogger("kvloop.cli")

_OTHER_FILES = 256
"""Listeners, logs, probes."""


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
    _allow_open_files(settings)
    try:
        uvloop.run(serve_until_signalled(settings))
    except (ListenError, KeyFileError) as error:
        print(f"kvloop: {error}", file=sys.stderr)
        return 1
    return 0


def _allow_open_files(settings: config.Settings) -> None:
    """A client's connection and its engine's are two open files; systems often allow 1024."""
    wanted = 2 * settings.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if max(soft, allowed) < wanted:
        logger.warning(
            "%d open files are allowed, %d connections may need %d: raise `ulimit -n` or lower "
            "max_connections",
            max(soft, allowed),
            settings.max_connections,
            wanted,
        )


def read_settings(options: argparse.Namespace) -> config.Settings:
    """Settings of the command line, the environment and the file. Raises ConfigError."""
    given = {name: value for name, value in vars(options).items() if name in config.FIELDS}
    environment_file = os.environ.get("KVLOOP_CONFIG")
    file = options.config or (Path(environment_file) if environment_file else None)
    settings = config.load(given, os.environ, file)
    settings.require_engines()
    return settings
