"""Certificates of our own making, for `edgelm share`: an authority that clients trust once, and the server's.

Owns these files. The authority may sign only for servers with the names of this machine or addresses of private
networks. `openssl` makes them: no Python package that could is among our dependencies.
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

from edgelm.base.errors import EdgeLMError
from edgelm.server.tls import Tls, read_tls, shown_to_client

AUTHORITY_DAYS, SERVER_DAYS = 3650, 397  # Apple's devices refuse a server's certificate of more than 825 days
DAY_S = 86_400
LEFT_S = 30 * DAY_S  # a certificate with less time left is made again
LIMIT_S = 30.0
PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
]
NOT_PERMITTED = 47  # X509_V_ERR_PERMITTED_VIOLATION of OpenSSL: the authority may not sign for one of the names


class NotRenewedError(EdgeLMError):
    """The server's certificate cannot be made again, and serves for some days more."""


@dataclass(frozen=True, slots=True)
class OwnCertificates:
    """The files of a folder."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate that clients have to trust."""
        return self.folder / "edgelm-ca.crt"

    @property
    def authority_key(self) -> Path:
        return self.folder / "edgelm-ca.key"

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

        Return whether the authority is new too: clients have to trust it. Raises NotRenewedError, EdgeLMError.
        """
        wanted = {name.lower() for name in names}
        if public := [name for name in wanted if _is_public(name)]:
            message = f"the certificate of our own cannot name {public[0]}, an address beyond private networks"
            raise EdgeLMError(message, "give --tls-cert with a certificate for it, or --host with another address")
        try:
            tls = self._current(wanted)
            left_s = tls.ends_at - time.time() if tls else 0.0
            if left_s > LEFT_S:
                return False
            try:
                return self._make(host, wanted)
            except (EdgeLMError, OSError) as error:
                if not tls:
                    raise
                days = f"{left_s / DAY_S:.0f} days"
                raise NotRenewedError(f"{self.server} ends in {days} and cannot be made again: {error}") from None
        except OSError as error:
            message = f"{self.folder} cannot be used: {error.strerror}"
            raise EdgeLMError(message, "make room, correct its owner, or set EDGELM_CONFIG_DIR") from None

    def _current(self, wanted: set[str]) -> Tls | None:
        """Return the server's certificate if clients of the authority accept it, with these names. Raises OSError."""
        try:
            tls = read_tls(self.server, self.key)
            _check(self.server, self.key, self.authority)
        except (EdgeLMError, ssl.SSLError, FileNotFoundError):
            return None
        return tls if wanted <= tls.names else None

    def _make(self, host: str, wanted: set[str]) -> bool:
        """Make the server's certificate, and an authority only if there is none that may ever sign it.

        Return whether it did. No file is replaced before the new ones are tested. Raises EdgeLMError and OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as name:
            made = Path(name)
            new = OwnCertificates(made)
            is_new = not (self._has_authority() and self._can_sign(made, wanted))
            if is_new:
                _make_authority(made, host, wanted)
                _sign(made, wanted, by=new)
                _keep(new.authority_key, self.authority_key)
                _keep(new.authority, self.authority)
            _keep(new.key, self.key)
            _keep(new.server, self.server)
        return is_new

    def _has_authority(self) -> bool:
        """Return whether there is an authority that has not expired. Raises OSError where it cannot be read."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=self.authority.read_text("ascii", errors="ignore"))
        except (FileNotFoundError, ssl.SSLError, ValueError):  # there is none, or it is no certificate
            return False
        ends_at = [ssl.cert_time_to_seconds(str(shown["notAfter"])) for shown in context.get_ca_certs()]
        return bool(ends_at) and min(ends_at) > time.time()

    def _can_sign(self, made: Path, wanted: set[str]) -> bool:
        """Sign in the folder `made`; return whether the authority may. Raises EdgeLMError where that may pass."""
        hint = f"correct that, or remove {self.authority}: then clients have to trust a new one"
        try:
            _sign(made, wanted, by=self)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code == NOT_PERMITTED:
                return False
            raise EdgeLMError(f"clients would refuse {self.authority}: {error.verify_message}", hint) from None
        except _OpensslError as error:
            raise EdgeLMError(f"{self.authority} cannot sign: {error.message}", hint) from None
        return True


class _OpensslError(EdgeLMError):
    """openssl refuses."""


def _check(certificate: Path, key: Path, authority: Path) -> None:
    """Raise SSLError where a client that trusts the authority refuses the certificate; OSError for no file."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # the caller compares the names
    client.load_verify_locations(authority)
    shown_to_client(read_tls(certificate, key).context, client)


def _make_authority(folder: Path, host: str, wanted: set[str]) -> None:
    names = sorted(name for name in wanted if _address(name) is None)
    permitted = [f"permitted;DNS:{name}" for name in names]
    permitted += [f"permitted;IP:{network.network_address}/{network.netmask}" for network in PRIVATE]
    extensions = {
        "basicConstraints": "critical,CA:TRUE,pathlen:0",
        "keyUsage": "critical,keyCertSign,cRLSign",
        "extendedKeyUsage": "serverAuth",  # not mail, programs or clients
        "subjectKeyIdentifier": "hash",
        "nameConstraints": f"critical,{','.join([*permitted, 'permitted;email:invalid'])}",  # RFC 2606: nobody's
    }
    new = OwnCertificates(folder)
    _make_key(new.authority_key)
    _write_config(folder, f"edgelm on {host}", extensions)
    made = ("-days", str(AUTHORITY_DAYS), "-out", new.authority.name, "-config", "config", "-extensions", "extensions")
    _openssl(folder, "req", "-new", "-x509", "-key", new.authority_key.name, "-sha256", *made)


def _sign(folder: Path, wanted: set[str], by: OwnCertificates) -> None:
    """Make the server's certificate in a folder. Raises _OpensslError, and SSLError where clients would refuse it."""
    named = sorted(f"{'DNS' if _address(name) is None else 'IP'}:{name}" for name in wanted)
    extensions = {
        "basicConstraints": "critical,CA:FALSE",
        "keyUsage": "critical,digitalSignature",
        "extendedKeyUsage": "serverAuth",
        "subjectKeyIdentifier": "hash",
        "authorityKeyIdentifier": "keyid",
        "subjectAltName": ",".join(named),
    }
    new = OwnCertificates(folder)
    _make_key(new.key)
    _write_config(folder, "edgelm", extensions)
    _openssl(folder, "req", "-new", "-key", new.key.name, "-sha256", "-config", "config", "-out", "request")
    signer = ("-CA", str(by.authority.absolute()), "-CAkey", str(by.authority_key.absolute()))
    number = ("-set_serial", str(secrets.randbits(120)), "-days", str(SERVER_DAYS), "-sha256")
    signed = ("-extfile", "config", "-extensions", "extensions", "-out", new.server.name)
    _openssl(folder, "x509", "-req", "-in", "request", *signer, *number, *signed)
    _check(new.server, new.key, by.authority)


def _keep(made: Path, file: Path) -> None:
    """Move a file within the file system, which needs no room."""
    made.chmod(0o600)
    made.replace(file)


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
    except OSError as error:
        raise EdgeLMError(f"{program} cannot run: {error.strerror}", "install openssl, or give --tls-cert") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        raise _OpensslError(f"openssl fails: {lines[0][:200]}", "give --tls-cert with a certificate of your own")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address; None for a DNS name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_public(name: str) -> bool:
    address = _address(name)
    return address is not None and not any(address in network for network in PRIVATE)
