"""What real vLLM was seen to do, as a file beside this one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.contract.script import Seen

_FILE = Path(__file__).with_name("vllm-0.32.0.json")


def read() -> dict[str, Seen]:
    """By step. Empty before anything was recorded."""
    if not _FILE.exists():
        return {}
    recorded: dict[str, Seen] = json.loads(_FILE.read_text(encoding="utf-8"))
    return recorded


def write(seen: dict[str, Seen]) -> None:
    """Replace the recording by what was seen; steps that were not run stay as they are."""
    lines = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in what.items())
        + "\n}"
        for name, what in {**read(), **seen}.items()
    ]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
