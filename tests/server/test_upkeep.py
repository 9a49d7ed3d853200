"""What a front looks after for months: certificates and keys that are replaced while it serves."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import FrontRecord, find_fronts, trusting
from edgelm.server.keys import Key, Keys
from edgelm.server.tls import Tls, read_tls, shown_to_client
from edgelm.server.upkeep import Renewal, Upkeep, certificate_files, key_file
from tests.server.test_keys import key_file as write_keys
from tests.server.test_tls import Pair, make, openssl

OF_USER = Key("this user", "sk-of-the-user", admin=True, of_user=True)


@pytest.fixture
def served(tmp_path: Path) -> tuple[Tls, Pair]:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    pair = make(tmp_path, "served")
    return read_tls(pair.certificate, pair.key), pair


def serial(tls: Tls, certificate: Path) -> Any:
    """Return the serial number of the certificate that a client gets which trusts the one of a file."""
    return shown_to_client(tls.context, trusting(certificate))["serialNumber"]


def replace(pair: Pair, by: Pair) -> None:
    by.certificate.replace(pair.certificate)
    by.key.replace(pair.key)


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_certificate_that_is_renewed_is_shown(served: tuple[Tls, Pair], tmp_path: Path, kind: str) -> None:
    tls, pair = served
    follow = certificate_files(tls)
    follow.check()
    before = serial(tls, pair.certificate)
    renewed = make(tmp_path, "renewed")
    if kind == "rsa":  # certbot 2 went the other way: each kind of key has a place of its own in a context
        new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=box.lan")
        openssl(tmp_path, *new, "-keyout", str(renewed.key), "-out", str(renewed.certificate))
    replace(pair, renewed)
    with pytest.raises(ssl.SSLError):
        serial(tls, pair.certificate)
    follow.check()
    assert serial(tls, pair.certificate) != before


def test_a_certificate_that_is_half_there_is_not_shown(
    served: tuple[Tls, Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls, pair = served
    follow = certificate_files(tls)
    old = tmp_path / "old.pem"
    shutil.copy(pair.certificate, old)
    before, renewed = serial(tls, old), make(tmp_path, "renewed")
    renewed.certificate.replace(pair.certificate)
    for _ in range(3):
        follow.check()
        assert serial(tls, old) == before
    assert caplog.text.count("is not the private key of") == 1
    assert "stays in use" in caplog.text
    renewed.key.replace(pair.key)
    follow.check()
    assert serial(tls, pair.certificate) != before
    assert len(caplog.records) == 1


def accepts(keys: Keys, secret: str) -> bool:
    return keys.find(Headers({"x-api-key": secret})) is not None


def test_a_key_that_is_removed_is_refused_and_a_new_one_accepted(tmp_path: Path) -> None:
    given = Key("typed", "sk-typed-here", admin=None)
    path = write_keys(tmp_path, "a sk-aaaaaaaa\nb sk-bbbbbbbb\n")
    keys = Keys([given, Key("a", "sk-aaaaaaaa"), Key("b", "sk-bbbbbbbb"), OF_USER])
    follow = key_file(path, keys, [given, OF_USER])
    follow.check()
    assert len([*keys]) == 4
    write_keys(tmp_path, "b sk-bbbbbbbb\nc sk-cccccccc admin\n")
    follow.check()
    accepted = {secret for secret in ("sk-aaaaaaaa", "sk-bbbbbbbb", "sk-cccccccc") if accepts(keys, secret)}
    assert accepted == {"sk-bbbbbbbb", "sk-cccccccc"}
    assert accepts(keys, given.secret)
    assert accepts(keys, OF_USER.secret)


@pytest.mark.parametrize("fault", ["empty", "gone", "readable by others"])
def test_keys_stay_where_their_file_is_not_right(tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    path = write_keys(tmp_path, "a sk-aaaaaaaa\n")
    keys = Keys([Key("a", "sk-aaaaaaaa"), OF_USER])
    follow = key_file(path, keys, [OF_USER])
    follow.check()
    faults: dict[str, Callable[[], object]] = {
        "empty": lambda: path.write_text(""),
        "gone": path.unlink,
        "readable by others": lambda: path.chmod(0o644),
    }
    faults[fault]()
    for _ in range(3):
        follow.check()
    assert accepts(keys, "sk-aaaaaaaa")
    [line] = caplog.messages
    assert line.startswith(f"warning: what {path} had before stays in use: ")
    write_keys(tmp_path, "b sk-bbbbbbbbbb\n")  # longer: kernels before 6.13 have few times for two changes
    follow.check()
    assert (accepts(keys, "sk-aaaaaaaa"), accepts(keys, "sk-bbbbbbbbbb")) == (False, True)


def test_a_renewal_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    problems = ["no openssl", "no openssl", "", "no openssl"]

    def renew() -> None:
        if problem := problems.pop(0):
            raise EdgeLMError(problem)

    renewal, told = Renewal(renew), []
    while problems:
        renewal.check()
        told.append(len(caplog.messages))
    assert told == [1, 1, 1, 2]


def test_a_certificate_of_our_own_is_made_again_and_then_shown(served: tuple[Tls, Pair], tmp_path: Path) -> None:
    """Also where the folder of the record cannot be made."""
    tls, pair = served
    before = serial(tls, pair.certificate)
    record = FrontRecord(os.getpid(), "https://127.0.0.1:1")
    (tmp_path / "no folder").touch()
    renewal = Renewal(lambda: replace(pair, make(tmp_path, "renewed")))
    Upkeep(tmp_path / "no folder" / "run", record, renewal, certificate_files(tls)).check()
    assert serial(tls, pair.certificate) != before


def test_a_folder_that_is_made_again_is_private(tmp_path: Path) -> None:
    """Another part of the server may have made it, with the modes of the umask."""
    record = FrontRecord(os.getpid(), "http://127.0.0.1:1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o775)
    Upkeep(tmp_path / "run", record).check()
    assert find_fronts(tmp_path / "run") == [record]
