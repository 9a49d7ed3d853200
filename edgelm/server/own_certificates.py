"""Certificates of our own making, for `edgelm share`: an authority that clients trust once, and the server's.

Owns these files. The authority may sign for the names of this machine and for addresses of private networks only, so
that its key is of little use to a thief. `openssl` makes them: no Python package that could is among our dependencies.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgelm.base.atomic import atomic_write
from edgelm.base.errors import EdgeLMError
from edgelm.server.tls import read_tls

AUTHORITY_DAYS, SERVER_DAYS = 3650, 397  # Apple's devices refuse a server's certificate of more than 825 days
LEFT_S = 30 * 86_400  # a certificate with less time left is made again
LIMIT_S = 30.0
PRIVATE = (
    "10.0.0.0/255.0.0.0",
    "100.64.0.0/255.192.0.0",
    "127.0.0.0/255.0.0.0",
    "169.254.0.0/255.255.0.0",
    "172.16.0.0/255.240.0.0",
    "192.168.0.0/255.255.0.0",
    "::1/ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    "fc00::/fe00::",
    "fe80::/ffc0::",
)


@dataclass(frozen=True, slots=True)
class OwnCertificates:
    """The files of a folder."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate that clients have to trust."""
        return self.folder / "edgelm-ca.crt"

    @property
    def server(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the authority, as phones and browsers show it."""
        der = ssl.PEM_cert_to_DER_cert(self.authority.read_text())
        return hashlib.sha256(der).digest().hex(":").upper()

    def renew(self, host: str, names: Iterable[str]) -> bool:
        """Make the server's certificate for these names and addresses, unless there is a good one.

        Return whether the authority is new too: clients have to trust it. Raises EdgeLMError.
        """
        wanted = {name.lower() for name in names}
        if self._is_good(wanted):
            return False
        is_new = not (self.authority.exists() and self._sign(wanted))
        if is_new:
            self._make_authority(host, wanted)
            if not self._sign(wanted):
                message = "the certificate of our own cannot name an address beyond private networks"
                raise EdgeLMError(message, "give --tls-cert with a certificate for it")
        return is_new

    def _is_good(self, wanted: set[str]) -> bool:
        try:
            tls = read_tls(self.server, self.key)
            self._verify(self.server)
        except (EdgeLMError, ssl.SSLError):
            return False
        return wanted <= tls.names and tls.ends_at - time.time() > LEFT_S

    def _verify(self, certificate: Path) -> None:
        """Raise _OpensslError where the authority does not stand for a certificate."""
        _openssl(self.folder, "verify", "-CAfile", self.authority.name, str(certificate.absolute()))

    def _make_authority(self, host: str, wanted: set[str]) -> None:
        names = sorted({name for name in wanted if not _is_address(name)})
        permitted = [f"permitted;DNS:{name}" for name in names] + [f"permitted;IP:{network}" for network in PRIVATE]
        extensions = {
            "basicConstraints": "critical,CA:TRUE,pathlen:0",
            "keyUsage": "critical,keyCertSign,cRLSign",
            "subjectKeyIdentifier": "hash",
            "nameConstraints": f"critical,{','.join(permitted)}",
        }
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _make_key(folder / "key")
            request = ("req", "-new", "-x509", "-key", "key", "-sha256", "-days", str(AUTHORITY_DAYS), "-out", "made")
            _write_config(folder, f"edgelm on {host}", extensions)
            _openssl(folder, *request, "-config", "config", "-extensions", "extensions")
            self._keep(folder / "key", self.folder / "edgelm-ca.key")
            self._keep(folder / "made", self.authority)

    def _sign(self, wanted: set[str]) -> bool:
        """Make the server's certificate; return whether the authority is one that can sign it."""
        named = sorted(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in wanted)
        extensions = {
            "basicConstraints": "critical,CA:FALSE",
            "keyUsage": "critical,digitalSignature",
            "extendedKeyUsage": "serverAuth",
            "subjectKeyIdentifier": "hash",
            "authorityKeyIdentifier": "keyid",
            "subjectAltName": ",".join(named),
        }
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _make_key(folder / "key")
            _write_config(folder, "edgelm", extensions)
            _openssl(folder, "req", "-new", "-key", "key", "-sha256", "-config", "config", "-out", "request")
            by = ("-CA", str(self.authority.absolute()), "-CAkey", str((self.folder / "edgelm-ca.key").absolute()))
            number = ("-set_serial", str(secrets.randbits(120)), "-days", str(SERVER_DAYS), "-sha256")
            signed = ("x509", "-req", "-in", "request", *by, *number, "-extfile", "config", "-extensions", "extensions")
            try:
                _openssl(folder, *signed, "-out", "made")
                self._verify(folder / "made")
            except _OpensslError:  # it has expired, or has another name, or is damaged
                return False
            self._keep(folder / "key", self.key)
            self._keep(folder / "made", self.server)
        return True

    def _keep(self, made: Path, file: Path) -> None:
        try:
            atomic_write(file, made.read_bytes())
        except OSError as error:
            raise EdgeLMError(
                f"{file} cannot be written: {error.strerror}", "make room, or set EDGELM_CONFIG_DIR"
            ) from None


class _OpensslError(EdgeLMError):
    """openssl refuses."""


def _make_key(file: Path) -> None:
    _openssl(file.parent, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", file.name)


def _write_config(folder: Path, subject: str, extensions: dict[str, str]) -> None:
    lines = [
        "[req]",
        "prompt = no",
        "distinguished_name = subject",
        "[subject]",
        f"CN = {subject[:64]}",
        "[extensions]",
    ]
    (folder / "config").write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in extensions.items())]))


def _openssl(folder: Path, *arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise EdgeLMError("there is no openssl here, which makes certificates", "install it, or give --tls-cert")
    try:
        done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise EdgeLMError("openssl does not end", "give --tls-cert with a certificate of your own") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        raise _OpensslError(f"openssl fails: {lines[0][:200]}", "give --tls-cert with a certificate of your own")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
