"""The router's settings: one TOML file, every key also an environment variable and a flag.

A flag wins over the environment, the environment over the file, the file over the default. What is
not a key is an error that names the nearest one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_AT_LEAST_ONE: Final = (
    "max_references",
    "prefill_concurrency",
    "decode_concurrency",
    "max_connections",
    "max_turns",
)
_ABOVE_ZERO: Final = ("request_timeout_s", "client_stall_timeout_s")
ENVIRONMENT_PREFIX: Final = "KVLOOP_"
NOT_SETTINGS: Final = frozenset({"KVLOOP_CACHE", "KVLOOP_CONFIG"})
"""Variables of the same prefix that are not settings of the router."""


class ConfigError(Exception):
    """A setting is unknown or has no valid value; the message says which and what to do."""


def _setting(default: Any, text: str) -> Any:
    metadata = {"help": text}
    if isinstance(default, list):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. Times in seconds, sizes in bytes, lengths in tokens."""

    prefill: tuple[str, ...] = _setting([], "URLs of the prefill nodes")
    decode: tuple[str, ...] = _setting([], "URLs of the decode nodes")
    render: tuple[str, ...] = _setting(
        [], "URLs of render servers (`vllm launch render`); default: the prefill nodes render"
    )
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8080, "port to listen on; 0 picks a free one")
    admin_host: str = _setting(
        "127.0.0.1", "address of the operators' listener (metrics, engines); empty: none"
    )
    admin_port: int = _setting(8081, "port of the operators' listener; 0 picks a free one")
    api_keys: str = _setting("", "file of API keys (`kvloop keys`); default: none are asked for")
    engine_api_key: str = _setting("", "API key sent to the engines in place of the client's")
    max_connections: int = _setting(4096, "connections of clients at once")
    max_turns: int = _setting(2048, "turns at once")
    max_turns_per_tenant: int = _setting(0, "turns at once of one tenant; 0: no limit of its own")
    request_timeout_s: float = _setting(
        60.0, "longest wait for a request's headers, and then for its body"
    )
    client_stall_timeout_s: float = _setting(
        60.0, "how long a client may read nothing of its answer before it is cut off"
    )
    reuse: bool = _setting(True, "read the history's KV back from decode nodes")
    threshold_tokens: int = _setting(64, "pull only what saves the prefill node as many tokens")
    kv_ttl_s: float = _setting(480.0, "how long decode nodes pin a turn (decoder_kv_blocks_ttl)")
    kv_lease_s: float = _setting(
        30.0, "how long prefill nodes keep blocks that nobody asks for (kv_lease_duration)"
    )
    deadline_margin_s: float = _setting(15.0, "a reference is not used this close to its end")
    pin_budget: float = _setting(
        0.5, "share of a decode node's KV cache that may be pinned for later turns"
    )
    canary_share: float = _setting(
        0.0, "share of pulled turns that are also computed cold and compared; 0: none"
    )
    canary_tolerance: float = _setting(
        0.5, "nats by which the two may differ (numerical noise) before reuse is switched off"
    )
    check_releases: bool = _setting(
        True, "try once whether each decode node frees blocks that are released unread"
    )
    max_references: int = _setting(100_000, "conversations to remember")
    max_ledger_bytes: int = _setting(1024**3, "memory for what is remembered of them")
    fingerprint_secret: str = _setting("", "secret of the token proofs; default: a random one")
    connect_timeout_s: float = _setting(2.0, "longest wait for an engine to accept a connection")
    prefill_timeout_s: float = _setting(600.0, "longest prefill leg")
    pull_timeout_s: float = _setting(60.0, "longest prefill leg that pulls, before it goes cold")
    first_byte_timeout_s: float = _setting(
        600.0, "longest wait for the first byte of a decode node's answer"
    )
    silence_timeout_s: float = _setting(600.0, "longest silence within a decode node's answer")
    decode_timeout_s: float = _setting(3600.0, "longest decode leg")
    render_timeout_s: float = _setting(10.0, "longest wait for token ids")
    prefill_concurrency: int = _setting(256, "prefill legs at once on each prefill node")
    decode_concurrency: int = _setting(2048, "decode legs at once on each decode node")
    queue_limit: int = _setting(1024, "turns that may wait for a place on each engine")
    queue_timeout_s: float = _setting(60.0, "longest wait for a place on an engine")
    orphan_grace_s: float = _setting(
        2.0, "how long a prefill node may go on for a client that has left, to give back its blocks"
    )
    probe_interval_s: float = _setting(5.0, "time between two looks at each engine")
    drain_timeout_s: float = _setting(30.0, "time for running turns to end at shutdown")
    max_body_bytes: int = _setting(64 * 1024 * 1024, "largest request body")
    log_level: str = _setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work."""
        for name in ("prefill", "decode", "render"):
            for url in getattr(self, name):
                if not url.startswith(("http://", "https://")):
                    raise ConfigError(f"{name}: {url!r} is no URL; write http://HOST:PORT")
        self._check_numbers()
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                f"log_level: {self.log_level!r} is none of debug, info, warning, error"
            )
        if self.fingerprint_secret and len(self.fingerprint_secret.encode()) < 16:
            raise ConfigError("fingerprint_secret: needs at least 16 bytes")

    def _check_numbers(self) -> None:
        for name, setting in FIELDS.items():
            value, default = getattr(self, name), _default(setting)
            if isinstance(default, int | float) and not isinstance(default, bool) and value < 0:
                raise ConfigError(f"{name}: {value} is negative")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be more than 0")
        for name in ("pin_budget", "canary_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name}: a share is at most 1, not {getattr(self, name)}")
        if self.deadline_margin_s >= self.kv_ttl_s:
            raise ConfigError(
                f"deadline_margin_s ({self.deadline_margin_s}) must be less than kv_ttl_s "
                f"({self.kv_ttl_s}), or no reference is ever used"
            )

    def require_engines(self) -> None:
        """Raises ConfigError unless there is at least one engine of each role."""
        for name in ("prefill", "decode"):
            if not getattr(self, name):
                raise ConfigError(
                    f"no {name} node: give --{name} URL, {ENVIRONMENT_PREFIX}{name.upper()} or "
                    f"`{name}` in the TOML file"
                )


FIELDS: Final = {setting.name: setting for setting in dataclasses.fields(Settings)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` a flag for every setting; unset ones stay out of the namespace."""
    for name, setting in FIELDS.items():
        flag = "--" + name.replace("_", "-")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        text = str(setting.metadata["help"])
        default = _default(setting)
        options["help"] = text if default in ((), "") else f"{text} (default: {default})"
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="+", action="extend", metavar="URL", **options)
        else:
            parser.add_argument(flag, metavar=name.rsplit("_", 1)[-1].upper(), **options)


def load(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> Settings:
    """Settings from all sources. Raises ConfigError."""
    values: dict[str, Any] = {}
    if file is not None:
        values |= _from_file(file)
    values |= _from_environment(environment)
    values |= {name: _convert(name, value, f"--{name}") for name, value in flags.items()}
    return Settings(**values)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    return {
        name: _convert(_known(name, str(file)), value, str(file)) for name, value in table.items()
    }


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NOT_SETTINGS:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[name] = _convert(_known(name, "environment", variable), value, variable)
    return values


def _known(name: str, where: str, spelled: str | None = None) -> str:
    if name in FIELDS:
        return name
    nearest = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.5)
    hint = f"; did you mean {_spell_like(spelled, nearest[0])}?" if nearest else ""
    raise ConfigError(f"{where}: unknown key {spelled or name}{hint}")


def _spell_like(spelled: str | None, name: str) -> str:
    return name if spelled is None else ENVIRONMENT_PREFIX + name.upper()


def _convert(name: str, value: Any, where: str) -> Any:
    default = _default(FIELDS[name])
    try:
        if isinstance(default, bool):
            return _to_bool(value)
        if isinstance(default, tuple):
            return tuple(_strings(value))
        if isinstance(value, bool):
            raise ValueError
        return type(default)(value)
    except (TypeError, ValueError) as error:
        kind = {tuple: "list of URLs", bool: "true or false", str: "text"}.get(
            type(default), "number"
        )
        raise ConfigError(f"{where}: {name} must be a {kind}, not {value!r}") from error


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    named = {"true": True, "1": True, "yes": True, "on": True}
    named |= {"false": False, "0": False, "no": False, "off": False}
    try:
        return named[str(value).lower()]
    except KeyError:
        raise ValueError(value) from None


def _strings(value: Any) -> Iterable[str]:
    """A list, or one text with commas or blanks between; a URL's last slash does not count."""
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    return [item.rstrip("/") for item in items]


def _default(setting: dataclasses.Field[Any]) -> Any:
    if setting.default is not dataclasses.MISSING:
        return setting.default
    return setting.default_factory() if callable(setting.default_factory) else ()
