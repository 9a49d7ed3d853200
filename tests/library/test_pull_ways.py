"""A pull over TLS and through the environment's proxies, with a connection that breaks."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.utils._http
import pytest
from gguf.constants import GGUFValueType as V

from edgelm.base.errors import EdgeLMError
from edgelm.library.http_range import DIRECT_BYTES
from edgelm.library.hub import Hub
from edgelm.library.names import HubReference
from edgelm.library.progress import Event, Retrying
from edgelm.library.pull import pull
from tests.checkpoints.gguf_bytes import RawGGUF
from tests.library.conftest import QUICK, Puller
from tests.library.hub_server import Fault, HubServer
from tests.library.proxies import Proxy

NAME = "o/m-GGUF"
FILE = "m-Q4_K_M.gguf"
SIZE = 3 * DIRECT_BYTES  # long enough for direct reads before and after the break
SMALLEST = RawGGUF({"general.architecture": (V.STRING, "llama")}).to_bytes() + bytes(2000)
BREAK = DIRECT_BYTES + 300_000
# httpcore2 2.16 leaves a connection to the garbage collector when the SOCKS handshake on it fails.
UNCLOSED = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a key and a certificate that is its own authority, for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program")
    path = tmp_path_factory.mktemp("tls") / "own.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=hub".split()
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{path}.key", "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(Path(f"{path}.key").read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the hub client open new connections, before and after."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        for spelling in (name, name.lower()):
            monkeypatch.delenv(spelling, raising=False)
    huggingface_hub.utils._http.close_session()
    yield
    huggingface_hub.utils._http.close_session()
    gc.collect()  # connections that httpcore2 left open warn here, where UNCLOSED applies


def check_broken_pull(server: HubServer, cache: Path) -> None:
    content = random.Random(3).randbytes(SIZE)
    server.add(NAME, {FILE: content})
    server.order(FILE, Fault("reset", BREAK))
    puller = Puller(server, cache)
    path = puller.pull(NAME)
    assert path.read_bytes() == content
    assert path.resolve().name == server.repos[NAME].files[FILE].blob
    assert puller.events_of(Retrying)
    assert 0 < server.sent[-1].start <= BREAK, "it went on where it was"
    assert puller.parts() == []


@pytest.mark.parametrize("command", ["pull", "pull --dry-run"])
def test_no_request_carries_telemetry(server: HubServer, tmp_path: Path, command: str) -> None:
    """Nothing beyond what the pull needs is asked, and nothing is told about this machine but the versions."""
    server.add(NAME, {FILE: SMALLEST})
    ours = {f"EDGELM_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "0"}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "DO_NOT_TRACK", "DISABLE_TELEMETRY"):
        hub[name] = ""
    environment = {**os.environ, **ours, **hub, "AI_AGENT": "some-agent", "CLAUDECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "edgelm", *command.split(), NAME],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert server.agents
    allowed = re.compile(rf"/api/models/{NAME}(/.*)?|/{NAME}/resolve/.*|/cdn/{NAME}/.*")
    assert [path for path, _ in server.agents if not allowed.fullmatch(path)] == []
    plain = re.compile(r"edgelm/[\w.]+; hf_hub/[\w.]+; python/[\w.]+")
    assert [agent for _, agent in server.agents if not plain.fullmatch(agent)] == []


@pytest.mark.parametrize("kind", [None, "http", "socks5"])
@pytest.mark.usefixtures("no_proxies")
def test_over_tls(cache: Path, certificate: Path, kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    with HubServer(tls=context) as server:
        if kind is None:
            check_broken_pull(server, cache)
            return
        with Proxy(kind) as proxy:
            monkeypatch.setenv("ALL_PROXY", proxy.url)
            check_broken_pull(server, cache)
            assert {port for _, port in proxy.addresses} == {urlsplit(url).port for url in (server.url, server.cdn)}


@pytest.mark.usefixtures("no_proxies")
def test_a_server_with_an_untrusted_certificate_gets_no_request(cache: Path, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with HubServer(tls=context) as server:
        with pytest.raises(EdgeLMError, match=r"cannot be reached: .*[Cc]ertificate|CERTIFICATE"):
            Puller(server, cache).pull(NAME)
        assert server.requests == []


@pytest.mark.parametrize("kind", ["http", "socks5"])
@pytest.mark.usefixtures("no_proxies")
def test_through_a_proxy(server: HubServer, cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(kind) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        check_broken_pull(server, cache)
    assert {port for _, port in proxy.addresses} == {urlsplit(url).port for url in (server.url, server.cdn)}


@UNCLOSED
@pytest.mark.parametrize("reply", [b"", b"\x05", b"\x05\xff", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@pytest.mark.usefixtures("no_proxies")
def test_a_server_that_is_no_socks_proxy_gives_one_line(
    server: HubServer, puller: Puller, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy("socks5", reply) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        with pytest.raises(EdgeLMError, match=r"cannot be reached: .+; check the network and the proxy") as error:
            puller.pull(NAME)
    assert str(error.value).isprintable()
    assert server.requests == []


@UNCLOSED
@pytest.mark.usefixtures("no_proxies")
def test_a_failing_socks_proxy_costs_no_byte(server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors come from below the HTTP library, also in the middle of a pull."""
    content = random.Random(3).randbytes(SIZE)
    server.add(NAME, {FILE: content})
    server.order(FILE, Fault("close", BREAK))
    hub = Hub(server.url, cache, replace(QUICK, first_wait_s=0.3, max_wait_s=0.3))
    with Proxy("socks5") as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url)

        def listen(event: Event) -> None:
            if isinstance(event, Retrying):
                proxy.reply = b""

        with pytest.raises(EdgeLMError, match="the SOCKS proxy does not answer like one; the downloaded part is kept"):
            pull(HubReference(NAME), hub, listen)
        proxy.reply = None
        assert pull(HubReference(NAME), hub, lambda _: None).path.read_bytes() == content
    assert server.sent_bytes(FILE) == SIZE
