"""The file of API keys: hashes and names, and the command that keeps it."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from kvloop.cli import main
from kvloop.gateway.keys import (
    KeyFile,
    KeyFileError,
    Keys,
    StoredKey,
    add_key,
    digest_of,
    read_keys,
    revoke_keys,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_key_is_its_tenants_and_nobody_elses(file: Path) -> None:
    ann, bob = add_key(file, "ann"), add_key(file, "bob")
    keys = Keys(read_keys(file))
    assert (keys.tenant_of(ann), keys.tenant_of(bob)) == ("ann", "bob")
    for wrong in ("", ann[:-1], ann + "x", ann.upper(), "ann", "\udcff"):
        assert keys.tenant_of(wrong) is None


def test_a_hash_that_only_begins_alike_opens_nothing() -> None:
    digest = digest_of("a key")
    keys = Keys([StoredKey("ann", digest[:-1] + bytes([digest[-1] ^ 1]))])
    assert keys.tenant_of("a key") is None


def test_the_file_holds_hashes_only_and_is_for_its_owner(file: Path) -> None:
    key = add_key(file, "ann")
    text = file.read_text()
    assert key not in text
    assert text == f"ann {hashlib.sha256(key.encode()).hexdigest()}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_are_long_and_never_the_same(file: Path) -> None:
    keys = {add_key(file, "ann") for _ in range(20)}
    assert len(keys) == 20
    assert all(len(key) >= 43 for key in keys)  # 256 bits in base64


def test_a_key_is_added_to_a_file_that_people_edit(file: Path) -> None:
    file.write_text("# ours\n\nann " + "0" * 64)  # no newline at the end
    add_key(file, "bob")
    assert [key.tenant for key in read_keys(file)] == ["ann", "bob"]


def test_revoking_takes_a_tenants_keys_or_one_of_them_and_leaves_the_rest(file: Path) -> None:
    file.write_text("# ours\n")
    first, second, bob = add_key(file, "ann"), add_key(file, "ann"), add_key(file, "bob")
    file.chmod(0o640)
    (one,) = revoke_keys(file, StoredKey("ann", digest_of(first)).key_id)
    keys = Keys(read_keys(file))
    assert (one.tenant, keys.tenant_of(first), keys.tenant_of(second)) == ("ann", None, "ann")
    assert len(revoke_keys(file, "ann")) == 1
    keys = Keys(read_keys(file))
    assert (keys.tenant_of(second), keys.tenant_of(bob)) == (None, "bob")
    assert file.read_text().startswith("# ours\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert revoke_keys(file, "ann") == []


@pytest.mark.parametrize("line", ["ann", "ann 12", "a b " + "0" * 64, "ann " + "G" * 64, "x" * 70])
def test_a_line_that_is_no_key_is_named_and_not_quoted(file: Path, line: str) -> None:
    file.write_text(f"# first\n{line}\n")
    with pytest.raises(KeyFileError, match="line 2") as caught:
        read_keys(file)
    assert line not in str(caught.value).replace(str(file), "")


def test_a_file_is_read_again_when_it_has_changed_and_at_most_once_a_second(file: Path) -> None:
    now_s = 0.0
    add_key(file, "ann")
    keys = KeyFile(file, lambda: now_s)
    new = add_key(file, "bob")
    now_s = 0.9
    assert keys.tenant_of(new) is None
    now_s = 1.1
    assert keys.tenant_of(new) == "bob"
    file.unlink()
    now_s = 3.0
    assert keys.tenant_of(new) == "bob"  # a file that is gone for a moment locks nobody out
    add_key(file, "ann")
    now_s = 5.0
    assert keys.tenant_of(new) is None


def test_the_command_adds_lists_and_revokes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "ann", "--file", str(file)]) == 0
    key = capsys.readouterr().out.strip()
    assert Keys(read_keys(file)).tenant_of(key) == "ann"
    assert main(["keys", "list", "--file", str(file)]) == 0
    listed = capsys.readouterr().out
    assert listed.split() == [read_keys(file)[0].key_id, "ann"]
    assert main(["keys", "revoke", listed.split()[0], "--file", str(file)]) == 0
    assert read_keys(file) == []


@pytest.mark.parametrize(
    "arguments", [["add", "no blanks"], ["list"], ["revoke", "ann"], ["add", "x" * 65]]
)
def test_wrong_use_is_explained(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["keys", *arguments, "--file", str(file)]) == 1
    assert capsys.readouterr().err.startswith("kvloop: ")
