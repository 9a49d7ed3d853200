"""The API keys of a front: where they come from, which one a request carries, and the namespace that each one has.

Owns keys in memory and the form of a key file. A key is never logged: its name and its namespace stand for it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgelm.base.errors import UsageError

MAX_FILE_BYTES = 2**20
MIN_KEY_LEN = 8  # of a key in a file; a shorter one is guessed
ADMIN = "admin"
CLIENT = "x-edgelm-client"  # header from the front to an engine process: who takes turns with others
USAGE = "x-edgelm-usage"  # header from the front to an engine process: the name under which it asks for the usage
NAMESPACE = "x-edgelm-namespace"  # header from the front to an engine process: the namespace of the request's key
_HINT = "write a line `NAME KEY`, `NAME KEY admin` or only `KEY` for each key"


@dataclass(frozen=True, slots=True)
class Key:
    """An API key. What one key stored or computed serves no other."""

    name: str
    secret: str = field(repr=False)
    admin: bool | None = False  # may load, unload, pull and delete models; None: only from the server's own machine
    of_user: bool = False  # of the commands of the user who started the front

    @property
    def cache_namespace(self) -> str:
        """A hash of the key, for files and other processes; empty: as a request without a key."""
        return "" if self.of_user else hashlib.sha256(self.secret.encode()).hexdigest()[:32]

    @property
    def label(self) -> str:
        """The key in a log."""
        rights = f", {ADMIN}" if self.admin else ""
        return f"{self.name} ({self.cache_namespace[:8]}{rights})"


class Keys:
    """The keys that a front accepts; none: it accepts every request."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def replace(self, keys: Iterable[Key]) -> bool:
        """Accept these keys only, in requests that come from now on. Return whether they are others."""
        before, self._keys = self._keys, tuple(keys)
        return set(self._keys) != set(before)

    def find(self, headers: Mapping[str, str]) -> Key | None:
        """Return the key of a request's headers: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        match = None
        for key in self._keys:  # all are compared: the time tells nothing of their order
            if hmac.compare_digest(sent.encode(), key.secret.encode()):
                match = key
        return match


def read_key_file(path: Path) -> list[Key]:
    """Return the keys of a file: a key per line, or its name, the key and perhaps `admin`; `#` begins a comment.

    Raises UsageError for a file that others can read or that is no file of this user, and for a wrong line.
    """
    keys: list[Key] = []
    for number, line in enumerate(_private_text(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, secret, *rest = words if len(words) > 1 else (f"key {number}", words[0])
        if secret == ADMIN:
            raise UsageError(f"line {number} of {path} marks a key as `{ADMIN}` without a name for it", _HINT)
        if rest not in ([], [ADMIN]):
            raise UsageError(f"line {number} of {path} has more than a name, a key and `{ADMIN}`", _HINT)
        check_secret(secret, f"the key in line {number} of {path}")
        if any(name == key.name or secret == key.secret for key in keys):
            raise UsageError(f"line {number} of {path} repeats a name or a key", "remove it")
        keys.append(Key(name, secret, bool(rest)))
    if not keys:
        raise UsageError(f"{path} has no key", _HINT)
    return keys


def read_secret(path: Path) -> str:
    """Return the one key of a file, which another server gets. Raises UsageError, as `read_key_file` does."""
    lines = [line.strip() for line in _private_text(path).splitlines()]
    secrets = [line for line in lines if line and not line.startswith("#")]
    if len(secrets) != 1 or not (secrets[0].isascii() and secrets[0].isprintable()) or " " in secrets[0]:
        raise UsageError(f"{path} is not a key alone", "write the key into the file, and nothing else")
    return secrets[0]


def check_secret(secret: str, place: str) -> None:
    """Raise UsageError for a key that is easily guessed or that no header can carry; the error names the place."""
    hint = "make one with `openssl rand -hex 24`"
    if len(secret) < MIN_KEY_LEN:
        raise UsageError(f"{place} is shorter than {MIN_KEY_LEN} characters", hint)
    if not (secret.isascii() and secret.isprintable()):
        raise UsageError(f"{place} has characters that are not printable ASCII", hint)
    if secret != secret.strip():
        raise UsageError(f"{place} begins or ends with a space", hint)


def _private_text(path: Path) -> str:
    """Return the text of a file that only this user can read. Raises UsageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a symbolic link" if path.is_symlink() else f"cannot be read: {error.strerror}"
        raise UsageError(f"the key file {path} {reason}", "give a file of your own") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(f"the key file {path} is not a file of yours", "give a file of your own")
        if status.st_mode & 0o077:
            raise UsageError(f"others can read the key file {path}", f"chmod 600 {path}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"the key file {path} is larger than {MAX_FILE_BYTES // 2**20} MiB", _HINT)
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"the key file {path} is not text", _HINT) from None
