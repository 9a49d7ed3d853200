"""`edgelm share`: what it prints, a real client over TLS, and certificates that follow the addresses."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import FrontRecord
from edgelm.commands import share
from edgelm.commands.share import _addresses, _host_names, _make_key, _renew
from edgelm.server import own_certificates
from edgelm.server.own_certificates import NotRenewedError, OwnCertificates
from edgelm.server.tls import read_tls
from tests.server.harness import LIMIT_S, read_line
from tests.server.test_serve import edgelm

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@contextmanager
def sharing(
    environment: dict[str, str], *arguments: str, host: tuple[str, ...] = ("--host", "127.0.0.1")
) -> Iterator[str]:
    """Give what `edgelm share` prints up to its last line before a QR code, while it serves."""
    command = [sys.executable, "-m", "edgelm", "share", *host, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            lines = read_line(process).decode()
            assert process.stdout
            while "docs/machines.md" not in lines:
                lines += process.stdout.readline().decode()
            yield lines
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=LIMIT_S)
            assert b"Traceback" not in errors
            print(rest.decode())
        finally:
            process.kill()


def said(lines: str, name: str) -> str:
    return next(line.split(maxsplit=1)[1] for line in lines.splitlines() if line.startswith(f"{name} "))


@pytest.mark.parametrize(("host", "is_told"), [("172.20.0.2", True), ("127.0.0.1", False)])
def test_in_wsl_it_says_that_windows_stands_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str, *, is_told: bool
) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr(share, "start_server", lambda *_, say, **__: say(FrontRecord(1, f"https://{host}:11500")))
    share.share_models(flags={"host": host}, qr=False)
    assert ("networkingMode=mirrored" in capsys.readouterr().out) == is_told


@pytest.fixture
def config(own: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return own | {"EDGELM_CONFIG_DIR": str(tmp_path / "config")}


def test_a_client_that_trusts_the_certificate_gets_in_with_the_key(
    config: dict[str, str], tmp_path: Path, models: Path
) -> None:
    folder = tmp_path / "config" / "share"
    with sharing(config, str(models / "tiny.gguf")) as lines:
        address = said(lines, "address")
        key = (folder / "keys.txt").read_text().split()[1]
        assert said(lines, "key") == f"in {folder / 'keys.txt'}"
        assert key not in lines
        assert "tiny.gguf" in said(lines, "exposed")
        assert {file.name: file.stat().st_mode & 0o077 for file in folder.iterdir()} == dict.fromkeys(
            ("edgelm-ca.crt", "edgelm-ca.key", "keys.txt", "server.key", "server.pem"), 0
        )
        trust = ssl.create_default_context(cafile=folder / "edgelm-ca.crt")
        trust.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 has it
        with httpx2.Client(trust_env=False, verify=trust) as http:
            client = openai.OpenAI(base_url=address, api_key=key, http_client=http)
            assert "tiny" in [model.id for model in client.models.list()]
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert answer.usage
            assert answer.usage.completion_tokens == 4
            assert http.get(f"{address}/models").status_code == 401
            unload = http.post(
                address.replace("/v1", "/models/unload"),
                json={"model": "tiny"},
                headers={"authorization": f"Bearer {key}"},
            )
            assert unload.status_code == 403, "the key is no administrator's"
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx2.get(f"{address}/models", trust_env=False, verify=ssl.create_default_context())


def test_the_qr_code_has_the_key_only_when_asked(config: dict[str, str], tmp_path: Path) -> None:
    from edgelm.commands.share import qr_text

    assert qr_text("https://a/v1", "") == "https://a/v1"
    assert qr_text("https://a/v1", "KEY") == "https://a/v1\nKEY"
    with sharing(config, "--with-key", "--no-qr") as lines:
        assert said(lines, "key") == (tmp_path / "config" / "share" / "keys.txt").read_text().split()[1]
    with sharing(config, "--no-qr") as again:
        assert "new:" not in said(again, "certificate"), "it is kept"
        assert said(again, "key").startswith("in ")


def test_own_keys_and_certificates_come_first(config: dict[str, str], tmp_path: Path) -> None:
    own = OwnCertificates(tmp_path / "own")
    own.renew("box", ["127.0.0.1", "box"])
    keys = tmp_path / "keys"
    keys.write_text("me a-key-of-mine\n")
    keys.chmod(0o600)
    tls = ("--tls-cert", str(own.server), "--tls-key", str(own.key))
    with sharing(config, "--no-qr", "--api-key-file", str(keys), *tls) as lines:
        assert said(lines, "key") == f"in {keys}"
        assert said(lines, "certificate") == f"{own.server}, as it is configured"
    assert not (tmp_path / "config" / "share").exists()


def test_a_certificate_follows_the_addresses_and_the_authority_stays(tmp_path: Path) -> None:
    own = OwnCertificates(tmp_path)
    assert own.renew("box", ["192.168.1.5", "box", "box.local"])
    authority, fingerprint = own.authority.read_bytes(), own.fingerprint
    assert not own.renew("box", ["192.168.1.5", "box", "box.local"])
    server = own.server.read_bytes()
    assert not own.renew("box", ["192.168.7.8", "box", "box.local"])
    assert own.server.read_bytes() != server
    assert "192.168.7.8" in read_tls(own.server, own.key).names
    assert own.authority.read_bytes() == authority
    assert own.renew("shed", ["192.168.7.8", "shed", "shed.local"]), "another name of the machine: another authority"
    assert own.fingerprint != fingerprint


def test_a_certificate_that_ends_soon_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    before = own.server.read_bytes()
    monkeypatch.setattr(own_certificates, "LEFT_S", 400 * 86_400)
    assert not own.renew("box", ["10.0.0.1", "box"])
    assert own.server.read_bytes() != before
    assert read_tls(own.server, own.key).ends_at > time.time() + 390 * 86_400


@pytest.mark.parametrize("name", ["edgelm-ca.crt", "edgelm-ca.key", "server.pem", "server.key"])
def test_a_damaged_file_is_made_again(tmp_path: Path, name: str) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    (tmp_path / name).write_text("nothing")
    is_new = own.renew("box", ["10.0.0.1", "box"])
    assert is_new == (name == "edgelm-ca.crt"), "only then clients have to trust another one"
    assert own.fingerprint.count(":") == 31
    read_tls(own.server, own.key)


def redate(certificate: Path, which: int, date: bytes) -> None:
    """Replace the begin (0) or the end (1) of a certificate that clients trust: nobody checks its own signature."""
    der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    before = re.findall(rb"\x17\x0d(\d{12}Z)", der)[which]
    certificate.write_text(ssl.DER_cert_to_PEM_cert(der.replace(before, date)))


def test_an_authority_that_is_not_valid_yet_or_whose_key_is_lost_stays(tmp_path: Path) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    redate(own.authority, 0, b"350101000000Z")  # as with a clock that is behind
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(EdgeLMError, match=r"clients would refuse .*edgelm-ca\.crt: .*not yet valid"):
        own.renew("box", ["10.0.0.1", "box"])
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    redate(own.authority, 0, b"200101000000Z")
    own.authority_key.write_text("nothing")
    with pytest.raises(EdgeLMError, match="cannot sign: openssl fails"):
        own.renew("box", ["10.0.0.2", "box"])
    assert own.server.read_bytes() == files[own.server]


def test_an_authority_that_has_expired_is_made_again(tmp_path: Path) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    redate(own.authority, 1, b"200101000000Z")
    assert own.renew("box", ["10.0.0.1", "box"])


def test_nothing_is_replaced_where_a_new_authority_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(EdgeLMError, match="beyond private networks"):
        own.renew("box", ["8.8.8.8", "box"])
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    openssl, calls = own_certificates._openssl, []

    def full(folder: Path, *arguments: str) -> None:
        if arguments[0] == "x509" and any("-x509" in call for call in calls):
            raise own_certificates._OpensslError("No space left on device")
        calls.append(arguments)
        openssl(folder, *arguments)

    monkeypatch.setattr(own_certificates, "_openssl", full)
    with pytest.raises(EdgeLMError, match="No space left"):
        own.renew("shed", ["10.0.0.1", "shed"])
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_a_thief_of_the_authority_s_key_can_sign_for_servers_only(tmp_path: Path) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    show = ["openssl", "x509", "-in", str(own.authority), "-noout", "-text"]
    text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert "TLS Web Server Authentication" in text
    assert "email:invalid" in text
    for mail, is_good in (("a@invalid", True), ("a@mail.example", False)):
        (tmp_path / "config").write_text(f"subjectAltName = email:{mail}\n")
        made = ["openssl", "req", "-new", "-key", str(own.key), "-subj", "/CN=a", "-out", str(tmp_path / "request")]
        subprocess.run(made, capture_output=True, check=True)
        by = ["-CA", str(own.authority), "-CAkey", str(own.authority_key), "-set_serial", "1", "-days", "9"]
        sign = ["openssl", "x509", "-req", "-in", str(tmp_path / "request"), *by, "-out", str(tmp_path / "mail")]
        subprocess.run([*sign, "-extfile", str(tmp_path / "config")], capture_output=True, check=True)
        verify = ["openssl", "verify", "-CAfile", str(own.authority)]
        for purpose, is_permitted in (((), is_good), (("-purpose", "smimesign"), False)):
            done = subprocess.run([*verify, *purpose, str(tmp_path / "mail")], capture_output=True, check=False)
            assert (done.returncode == 0) == is_permitted


def test_a_good_certificate_serves_without_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert not own.renew("box", ["10.0.0.1", "box"])


@pytest.mark.parametrize("fault", ["openssl", "folder"])
def test_a_certificate_with_days_left_serves_where_it_cannot_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    monkeypatch.setattr(own_certificates, "LEFT_S", 400 * 86_400)
    if fault == "openssl":
        monkeypatch.setattr(shutil, "which", lambda _: None)
    else:
        monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(NotRenewedError, match="ends in 397 days and cannot be made again"):
        own.renew("box", ["10.0.0.1", "box"])
    with pytest.raises(EdgeLMError) as caught:
        own.renew("box", ["10.0.0.2", "box"])
    assert not isinstance(caught.value, NotRenewedError)


def test_a_certificate_with_days_left_is_shared_and_may_be_made_again_later(
    config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in config.items():
        monkeypatch.setenv(name, value)
    own = OwnCertificates(tmp_path / "config" / "share")
    own.renew("box", ["127.0.0.1", "localhost", *_host_names()])
    monkeypatch.setattr(own_certificates, "LEFT_S", 400 * 86_400)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(share, "start_server", lambda *_, **options: started.append(options))
    share.share_models([], flags={"host": "127.0.0.1"}, qr=False)
    [line] = caplog.messages
    assert line.startswith("warning: ")
    assert "cannot be made again" in line
    [options] = started
    with pytest.raises(NotRenewedError):
        options["renew"]()
    monkeypatch.undo()
    before = own.server.read_bytes()
    monkeypatch.setattr(own_certificates, "LEFT_S", 400 * 86_400)
    options["renew"]()
    assert own.server.read_bytes() != before


def test_a_running_server_follows_its_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = OwnCertificates(tmp_path)
    names = ["box", "localhost"]
    own.renew("box", ["10.0.0.1", *names])
    authority = own.authority.read_bytes()
    found = ["192.168.1.5"]
    monkeypatch.setattr(share, "_addresses", lambda _: found)
    _renew(own, share.EVERYWHERE, names)
    served = read_tls(own.server, own.key).names
    assert served == {"192.168.1.5", *names}
    found.clear()  # the network is away for a while
    _renew(own, share.EVERYWHERE, names)
    assert read_tls(own.server, own.key).names == served
    assert own.authority.read_bytes() == authority
    assert not caplog.text


def refuse(*_: object, **__: object) -> bool:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_files_of_another_user_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnCertificates(tmp_path)
    own.renew("box", ["10.0.0.1", "box"])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(EdgeLMError, match=f"{tmp_path} cannot be used: Permission denied"):
            own.renew("box", ["10.0.0.2", "box"])
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", refuse)
        with pytest.raises(EdgeLMError, match="openssl cannot run: Permission denied"):
            own.renew("shed", ["10.0.0.2", "shed"])


def test_a_name_that_is_no_dns_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, names in (("Ann's box", []), ("Box.lan", ["box.local", "box"]), ("my_box", [])):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert _host_names() == names


def test_the_authority_stays_when_the_network_has_another_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OwnCertificates(tmp_path)
    for host, is_new in (("mac.fritz.box", True), ("mac.corp.example", False)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert own.renew(host, ["10.0.0.1", *_host_names()]) == is_new


def test_a_key_of_the_settings_is_refused(config: dict[str, str]) -> None:
    done = edgelm(config | {"EDGELM_API_KEY": "x"}, "share", "--host", "127.0.0.1", "--port", "0")
    assert done.returncode == 2
    assert "EDGELM_API_KEY has api_key" in done.stderr
    assert "--api-key-file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_administrator_s_key_is_shown(config: dict[str, str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("root a-key-of-root admin\n")
    keys.chmod(0o600)
    flags = ("--with-key", "--no-qr", "--api-key-file", str(keys))
    done = edgelm(config, "share", "--host", "127.0.0.1", "--port", "0", *flags)
    assert done.returncode == 2
    assert "only keys marked `admin`" in done.stderr
    keys.write_text("root a-key-of-root admin\nme a-key-of-mine\n")
    with sharing(config, *flags) as lines:
        assert said(lines, "key") == "a-key-of-mine"
        assert "not exposed" not in lines
        assert "marked `admin` may also" in lines


def test_a_host_of_the_settings_stays(config: dict[str, str]) -> None:
    with sharing(config | {"EDGELM_HOST": "127.0.0.1"}, "--no-qr", host=()) as lines:
        assert said(lines, "address").startswith("https://127.0.0.1:")
        assert "Nobody else is let in: EDGELM_HOST has the host 127.0.0.1" in lines


def test_a_key_file_of_another_user_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(EdgeLMError, match=r"keys\.txt cannot be used: Permission denied"):
        _make_key(tmp_path / "keys.txt")


def test_no_certificate_names_an_address_beyond_private_networks(tmp_path: Path) -> None:
    with pytest.raises(EdgeLMError, match="give --tls-cert"):
        OwnCertificates(tmp_path).renew("box", ["box", "8.8.8.8"])


def test_without_openssl_it_says_so(config: dict[str, str], tmp_path: Path) -> None:
    done = edgelm(config | {"PATH": str(tmp_path)}, "share", "--host", "127.0.0.1", "--port", "0")
    assert done.returncode == 1
    assert "there is no openssl here" in done.stderr


def test_an_address_of_ones_own_is_the_only_one() -> None:
    assert _addresses("10.1.2.3") == ["10.1.2.3"]
