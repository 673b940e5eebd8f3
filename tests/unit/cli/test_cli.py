"""The command line: what is missing or wrong is said on stderr, with an exit code."""

import socket
from pathlib import Path

import pytest

from kvloop.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    return code, capsys.readouterr().err


BOTH = ("--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "COMMAND"),
        (("serve",), "no prefill node"),
        (("serve", "--prefill", "http://p"), "no decode node"),
        (("serve", "--prefill", "p:1", "--decode", "http://d"), "is no URL"),
        (("serve", *BOTH, "--port", "many"), "must be a number"),
        (("serve", *BOTH, "--config", "/does/not/exist.toml"), "cannot read"),
        (("demo", "--turns", "0"), "at least 1"),
    ],
)
def test_wrong_use_is_explained(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    code, error = run(capsys, *arguments)
    assert code == 2
    assert says in error


def test_an_unknown_key_in_the_file_names_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "k.toml").write_text("prefil = ['http://p']\n")
    code, error = run(capsys, "serve", "--config", str(tmp_path / "k.toml"))
    assert code == 2
    assert "did you mean prefill" in error


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, error = run(capsys, "serve", *BOTH, "--port", port)
    assert code == 1
    assert port in error
