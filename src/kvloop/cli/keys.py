"""`kvloop keys`: the file of API keys that `kvloop serve --api-keys FILE` reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvloop.gateway.keys import KeyFileError, add_key, read_keys, revoke_keys

if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "keys",
        help="add, list and revoke the API keys of your clients",
        description="Keep the file of API keys that `kvloop serve --api-keys FILE` reads. It holds "
        "hashes only. A running router follows the file within a second.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key; it is printed once and is nowhere else")
    add.add_argument("tenant", metavar="TENANT", help="whose key it is")
    add.set_defaults(run=_or_why_not, act=_add)
    list_ = actions.add_parser("list", help="tenants and ids of their keys")
    list_.set_defaults(run=_or_why_not, act=_list)
    revoke = actions.add_parser("revoke", help="take a tenant's keys out, or one of them")
    revoke.add_argument("name", metavar="TENANT|ID", help="as `kvloop keys list` shows them")
    revoke.set_defaults(run=_or_why_not, act=_revoke)
    for action in (add, list_, revoke):
        action.add_argument("--file", type=Path, required=True, help="the file of API keys")


def _or_why_not(options: argparse.Namespace) -> int:
    try:
        code: int = options.act(options)
    except KeyFileError as error:
        print(f"kvloop: {error}", file=sys.stderr)
        return 1
    return code


def _add(options: argparse.Namespace) -> int:
    print(add_key(options.file, options.tenant))
    print("kvloop: keep this key; only its hash is stored", file=sys.stderr)
    return 0


def _list(options: argparse.Namespace) -> int:
    for key in read_keys(options.file):
        print(f"{key.key_id} {key.tenant}")
    return 0


def _revoke(options: argparse.Namespace) -> int:
    revoked = revoke_keys(options.file, options.name)
    for key in revoked:
        print(f"revoked {key.key_id} {key.tenant}")
    if not revoked:
        print(f"kvloop: no key of {options.name!r} in {options.file}", file=sys.stderr)
        return 1
    return 0
