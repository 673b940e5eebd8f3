"""Settings: one key, four sources; what is wrong is named with what to do."""

import argparse
from pathlib import Path

import pytest

from kvloop.config import FIELDS, ConfigError, Settings, add_flags, load


def flags(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "kvloop.toml"


def test_a_flag_beats_the_environment_which_beats_the_file(toml: Path) -> None:
    toml.write_text('port = 1\nthreshold_tokens = 1\nhost = "file"\nreuse = false\n')
    environment = {"KVLOOP_PORT": "2", "KVLOOP_THRESHOLD_TOKENS": "2", "PATH": "/bin"}
    settings = load(flags("--port", "3"), environment, toml)
    assert (settings.port, settings.threshold_tokens, settings.host) == (3, 2, "file")
    assert settings.reuse is False


_VALUES = {
    "prefill": "http://somewhere",
    "decode": "http://somewhere",
    "render": "http://somewhere",
    "reuse": "true",
    "check_releases": "true",
    "log_level": "debug",
    "fingerprint_secret": "x" * 16,
    "pin_budget": "0.3",
    "canary_share": "0.3",
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_key_is_a_flag_an_environment_variable_and_a_toml_key(name: str, toml: Path) -> None:
    value = _VALUES.get(name, "30")
    toml.write_text(f"{name} = '{value}'\n")
    from_file = load({}, {}, toml)
    assert from_file == load({}, {f"KVLOOP_{name.upper()}": value}, None)
    flag = "--" + name.replace("_", "-")
    given = [flag] if value == "true" else [flag, value]
    assert from_file == load(flags(*given), {}, None)


def test_lists_may_be_written_with_commas_and_lose_their_last_slash(toml: Path) -> None:
    toml.write_text('prefill = ["http://a/", "http://b"]\n')
    assert load({}, {}, toml).prefill == ("http://a", "http://b")
    assert load({}, {"KVLOOP_PREFILL": "http://a, http://b/"}, None).prefill == (
        "http://a",
        "http://b",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("treshold_tokens = 3", "unknown key treshold_tokens; did you mean threshold_tokens"),
        ("port = 'x'", "port must be a number"),
        ("port = true", "port must be a number"),
        ("reuse = 'maybe'", "reuse must be a true or false"),
        ("prefill = [1]", "prefill must be a list of URLs"),
        ("prefill = 'localhost:8000'", "write http://HOST:PORT"),
        ("port = -1", "negative"),
        ("deadline_margin_s = 480", "no reference is ever used"),
        ("log_level = 'loud'", "log_level"),
        ("max_references = 0", "at least 1"),
        ("fingerprint_secret = 'short'", "16 bytes"),
        ("port = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(toml: Path, text: str, message: str) -> None:
    toml.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load({}, {}, toml)


def test_an_unknown_environment_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean KVLOOP_KV_TTL_S"):
        load({}, {"KVLOOP_KV_TTL": "1"}, None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load({}, {}, tmp_path / "none.toml")


def test_serving_needs_both_roles() -> None:
    with pytest.raises(ConfigError, match="--decode"):
        Settings(prefill=("http://p",)).require_engines()
