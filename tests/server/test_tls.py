"""TLS from certificate files: the front over https, and a clear line for files that are not right."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import trusting
from edgelm.client.link import Link
from edgelm.server.tls import read_tls
from tests.server.harness import LIMIT_S, body, serving, until
from tests.server.test_serve import edgelm

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
CA = """
[ca]
default_ca = own
[own]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
"""


class Pair(NamedTuple):
    certificate: Path
    key: Path


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=LIMIT_S)


def make(folder: Path, name: str, first: str = "", last: str = "") -> Pair:
    """Return a certificate for box.lan, of the given time or of the next days."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    subject = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=box.lan")
    if not first:
        names = ("-addext", "subjectAltName=DNS:Box.lan,DNS:*.box.lan,IP:10.1.2.3")
        openssl(folder, "req", "-x509", *subject, *names, "-keyout", str(pair.key), "-out", str(pair.certificate))
        return pair
    (folder / "ca.cnf").write_text(CA)
    (folder / "index.txt").write_text("")
    openssl(folder, "req", "-new", *subject, "-keyout", str(pair.key), "-out", "request")
    sign = ("ca", "-batch", "-notext", "-config", "ca.cnf", "-selfsign", "-keyfile", str(pair.key), "-in", "request")
    openssl(folder, *sign, "-startdate", first, "-enddate", last, "-out", str(pair.certificate))
    return pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return make(folder, "box")


@pytest.fixture(scope="module")
def expired(folder: Path) -> Pair:
    return make(folder, "old", "20200101000000Z", "20200102000000Z")


def test_a_front_speaks_https(own: dict[str, str], models: Path, tmp_path: Path, pair: Pair) -> None:
    arguments = ("--host", "0.0.0.0", "--tls-cert", pair.certificate, "--tls-key", pair.key, models / "tiny.gguf")
    environment = own | {"EDGELM_API_KEY": "a secret key"}
    with serving(environment, *arguments, log=tmp_path / "log") as front:
        assert front.address.startswith("https://127.0.0.1:")
        port = int(front.address.rpartition(":")[2])
        headers = {"authorization": "Bearer a secret key", "prefer": "wait"}
        with httpx2.Client(
            base_url=front.address, headers=headers, verify=trusting(pair.certificate), trust_env=False, timeout=LIMIT_S
        ) as http:
            assert http.post("/v1/chat/completions", json=body("tiny", "hello")).status_code == 200
            streamed = http.post("/v1/chat/completions", json=body("tiny", "hello", stream=True))
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert http.get("/v1/models", headers={"authorization": "Bearer none"}).status_code == 401
            assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
            assert http.get("/health", headers={"host": "box.lan"}).status_code == 200, "a name of the certificate"
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(front.address, trust_env=False)
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        with (
            socket.create_connection(("127.0.0.1", port), LIMIT_S) as plain,
            trusting(pair.certificate).wrap_socket(plain) as connection,
        ):
            assert connection.version() in ("TLSv1.2", "TLSv1.3")
            connection.sendall(b"GET /health HTTP/1.1\r\nbroken\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        done = edgelm(own, "ps", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["address"] == front.address
    assert "Traceback" not in (tmp_path / "log").read_text()


async def test_a_running_front_takes_renewed_files(own: dict[str, str], tmp_path: Path) -> None:
    """And a chat that is connected meanwhile connects again."""
    old, keys = make(tmp_path, "served"), tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("old the-old-key\nsame the-same-key\n")
    arguments = ("--tls-cert", old.certificate, "--tls-key", old.key, "--api-key-file", keys)

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        try:
            trust = trusting(old.certificate)
            return httpx2.get(f"{front.address}/v1/models", headers=headers, verify=trust, trust_env=False).status_code
        except httpx2.ConnectError:  # the certificate is another one
            return 0

    with serving(own, *arguments, log=tmp_path / "log", module="tests.server.impatient_front") as front:
        assert [status(key) for key in ("the-old-key", "the-same-key", "the-new-key")] == [200, 200, 401]
        link = Link(endpoint=None, api_key=None, runtime=Path(own["EDGELM_RUNTIME_DIR"]), log=tmp_path / "serve.log")
        await link.models()
        new = make(tmp_path, "renewed")
        new.certificate.replace(old.certificate)
        new.key.replace(old.key)
        keys.write_text("new the-new-key\nsame the-same-key\n")
        until("the new key is accepted", lambda: status("the-new-key") == 200)
        assert [status(key) for key in ("the-old-key", "the-same-key")] == [401, 200]
        await link.lost()
        assert (await link.client()).address == front.address
        await link.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


async def test_the_chat_finds_a_front_with_https_and_keys(
    own: dict[str, str], models: Path, tmp_path: Path, pair: Pair
) -> None:
    environment = own | {"EDGELM_API_KEY": "a secret key"}
    arguments = ("--tls-cert", pair.certificate, "--tls-key", pair.key, models / "tiny.gguf")
    with serving(environment, *arguments, log=tmp_path / "log") as front:
        runtime = Path(own["EDGELM_RUNTIME_DIR"])
        link = Link(endpoint=None, api_key=None, runtime=runtime, log=tmp_path / "serve.log")
        client = await link.client()
        assert client.address == front.address
        assert client.is_edgelm
        assert "tiny" in {model.id for model in await link.models()}
        await link.close()


async def test_the_front_of_a_chat_may_have_a_key_file_and_https(
    own: dict[str, str], tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("editor the-key-of-the-editor\n")
    settings = {"EDGELM_API_KEY_FILE": str(keys), "EDGELM_TLS_CERT": str(pair.certificate)}
    for name, value in (own | settings | {"EDGELM_TLS_KEY": str(pair.key)}).items():
        monkeypatch.setenv(name, value)
    link = Link(endpoint=None, api_key=None, runtime=tmp_path / "none", log=tmp_path / "serve.log")
    try:
        client = await link.client()
        assert client.address.startswith("https://")
        assert client.is_edgelm, "it has the right key"
    finally:
        await link.close()


def test_a_certificate_that_has_expired_is_a_warning(own: dict[str, str], tmp_path: Path, expired: Pair) -> None:
    arguments = ("--tls-cert", expired.certificate, "--tls-key", expired.key)
    with serving(own, *arguments, log=tmp_path / "log") as front:
        [line] = (tmp_path / "log").read_text().splitlines()
        assert line.startswith("warning: ")
        assert "expired" in line
        assert str(expired.certificate) in line
        done = edgelm(own, "ps", "--json")
        assert json.loads(done.stdout)["pid"] == front.process.pid, "our own commands trust exactly this certificate"


def test_a_certificate_of_a_later_time_is_a_warning(folder: Path) -> None:
    pair = make(folder, "late", "20900101000000Z", "20910101000000Z")
    assert "not valid yet" in read_tls(*pair).warning


def test_a_right_certificate_has_names_and_no_warning(pair: Pair) -> None:
    tls = read_tls(*pair)
    assert (set(tls.names), tls.warning) == ({"box.lan", "10.1.2.3"}, "")


def test_one_file_may_have_both(pair: Pair, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(pair.certificate.read_text() + pair.key.read_text())
    assert read_tls(both, None).warning == ""


def test_wrong_files_are_one_clear_line(pair: Pair, expired: Pair, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("nothing")
    locked = tmp_path / "locked.key"
    protected = ("ec", "-in", str(pair.key), "-aes128", "-passout", "pass:hello", "-out", str(locked))
    openssl(tmp_path, *protected)
    for certificate, key, says in (
        (tmp_path / "none.pem", pair.key, "certificate .*none.pem cannot be read: No such file"),
        (pair.certificate, tmp_path / "none.key", "private key .*none.key cannot be read"),
        (pair.certificate, tmp_path, "cannot be read: Is a directory"),
        (pair.certificate, expired.key, "is not the private key of"),
        (pair.certificate, text, "in PEM form"),
        (text, pair.key, "in PEM form"),
        (pair.certificate, None, "holds no private key; add --tls-key"),
        (text, None, "holds no private key"),
        (pair.certificate, locked, "has a password"),
    ):
        with pytest.raises(EdgeLMError, match=says) as caught:
            read_tls(certificate, key)
        assert caught.value.hint


def test_a_key_without_a_certificate_is_refused(own: dict[str, str], pair: Pair) -> None:
    done = edgelm(own, "serve", "--port", "0", "--tls-key", str(pair.key))
    assert done.returncode == 2
    assert "--tls-cert" in done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
