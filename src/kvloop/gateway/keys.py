"""API keys: whose a key is, from a file that holds hashes and names, never a key.

One key a line: ``TENANT SHA256``, in hex. A tenant may have several. Keys are 256 random bits, so
nothing can be guessed from a hash and a slow one would protect nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

logger = logging.getLogger("kvloop.gateway")

KEY_PREFIX: Final = "kvl-"
"""Lets secret scanners, and people, recognise a key."""
_KEY_BYTES: Final = 32
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ID_DIGITS: Final = 12
_LOOK_EVERY_S: Final = 1.0


class KeyFileError(Exception):
    """The file cannot be used; the message says where and why, without its content."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """What is kept of a key."""

    tenant: str
    digest: bytes

    @property
    def key_id(self) -> str:
        """Names the key to people, and does not help to guess it."""
        return self.digest.hex()[:_ID_DIGITS]

    @property
    def line(self) -> str:
        """As it stands in the file."""
        return f"{self.tenant} {self.digest.hex()}\n"


class Keys:
    """A set of keys."""

    def __init__(self, stored: Iterable[StoredKey]) -> None:
        self._by_id = {key.key_id: key for key in stored}

    def __len__(self) -> int:
        return len(self._by_id)

    def tenant_of(self, key: str) -> str | None:
        """The tenant whose key this is; None if it is nobody's.

        Found by a part of its hash, then compared in constant time: neither tells a caller by its
        duration how much of a key was right.
        """
        digest = digest_of(key)
        found = self._by_id.get(digest.hex()[:_ID_DIGITS])
        same = hmac.compare_digest(digest, found.digest if found else bytes(len(digest)))
        return found.tenant if found and same else None


class KeyFile:
    """The keys in a file, as it is now: looked at once a second at most."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Raises KeyFileError. ``clock``: monotonic seconds."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._keys = Keys(read_keys(path))
        self._looked_s = clock()

    def tenant_of(self, key: str) -> str | None:
        """See :meth:`Keys.tenant_of`."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self.reload()
        return self._keys.tenant_of(key)

    def reload(self) -> None:
        """Read the file again. One that cannot be used is logged, and the keys stay as they were:
        a slip of an editor must not lock everybody out."""
        stamp = _stamp(self._path)
        try:
            self._keys = Keys(read_keys(self._path))
        except KeyFileError as error:
            logger.error("API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys read from %s", len(self._keys), self._path)
        self._stamp = stamp


def digest_of(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> list[StoredKey]:
    """Every key in the file. Raises KeyFileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path} is not UTF-8 text") from error
    stored = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        tenant, _, digest = line.strip().partition(" ")
        if not _TENANT.fullmatch(tenant) or not _DIGEST.fullmatch(digest.strip()):
            raise KeyFileError(f"{path}, line {number}: not `TENANT SHA256`; use `kvloop keys add`")
        stored.append(StoredKey(tenant, bytes.fromhex(digest.strip())))
    return stored


def add_key(path: Path, tenant: str) -> str:
    """Make a key for ``tenant`` and store its hash; returns the key, which is nowhere else.

    The file is made, readable by its owner only, if there is none. Raises KeyFileError.
    """
    if not _TENANT.fullmatch(tenant):
        raise KeyFileError("a tenant's name is 1 to 64 letters, digits, `.`, `_` or `-`")
    if path.exists():
        read_keys(path)
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    line = StoredKey(tenant, digest_of(key)).line
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            text = file.read()
            unfinished = text != "" and not text.endswith("\n")
            file.write("\n" * unfinished + line)
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from error
    return key


def revoke_keys(path: Path, name: str) -> list[StoredKey]:
    """Take out a tenant's keys, or the one of that id; returns them. Raises KeyFileError."""
    revoked = [key for key in read_keys(path) if name in (key.tenant, key.key_id)]
    if revoked:
        gone = {key.line.split()[1] for key in revoked}
        new = path.with_name(path.name + ".new")
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            new.touch(mode=0o600)
            new.chmod(path.stat().st_mode)
            kept = [line for line in lines if gone.isdisjoint(line.split())]
            new.write_text("".join(kept), encoding="utf-8")
            new.replace(path)
        except OSError as error:
            raise KeyFileError(f"cannot write {path}: {error.strerror}") from error
    return revoked


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
