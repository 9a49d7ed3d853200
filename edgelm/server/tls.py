"""TLS of a front: a certificate and its private key, from the user's files.

Owns the checks of these files. Knows nothing of sockets.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import trusting


@dataclass(frozen=True, slots=True)
class Tls:
    """A certificate that is ready to be served with."""

    context: ssl.SSLContext
    certificate: Path
    key: Path
    names: frozenset[str]  # DNS names and addresses of the certificate, in lower case, without wildcards
    warning: str  # why clients will refuse it; empty: its time is now
    ends_at: float  # in seconds since 1970

    def replace_by(self, other: Tls) -> None:
        """Show the certificate of `other` to connections that this context makes from now on."""

        def show_other(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = other.context

        # A context has a certificate for each kind of key: loaded into it, an RSA one would stand beside an old EC one.
        self.context.sni_callback = show_other


def read_tls(certificate: Path, key: Path | None) -> Tls:
    """Return the certificate and private key of PEM files; without `key` the certificate's file has both.

    Raises EdgeLMError for files that are missing, unreadable, or do not belong together.
    """
    certificate = certificate.expanduser().absolute()
    key = key.expanduser() if key else certificate
    for kind, file in (("certificate", certificate), ("private key", key)):
        try:
            file.open("rb").close()
        except OSError as error:
            raise EdgeLMError(f"the {kind} {file} cannot be read: {error.strerror}", "give another file") from None

    def refuse_password() -> str:
        raise EdgeLMError(f"the private key {key} has a password", "remove it with `openssl pkey -in KEY -out NEW`")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
        shown = shown_to_client(context, trusting(certificate))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"{key} is not the private key of {certificate}"
        elif key == certificate and b"PRIVATE KEY-----" not in certificate.read_bytes():
            raise EdgeLMError(f"{certificate} holds no private key", "add --tls-key FILE") from None
        else:
            message = f"{certificate} and {key} are not a certificate and its private key in PEM form"
        raise EdgeLMError(message, "give --tls-cert and --tls-key the right files") from None
    names = {str(value).lower() for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")}
    warning, ends_at = "", ssl.cert_time_to_seconds(shown["notAfter"])
    if time.time() > ends_at:
        warning = f"the certificate {certificate} has expired: clients will refuse it"
    elif time.time() < ssl.cert_time_to_seconds(shown["notBefore"]):
        warning = f"the certificate {certificate} is not valid yet: clients will refuse it"
    public = frozenset(name for name in names if "*" not in name)
    return Tls(context, certificate, key, public, warning, ends_at)


def shown_to_client(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> dict[str, Any]:
    """Return a server's certificate as a client sees it, by a handshake in memory. Raises SSLError if it refuses it.

    Python reads the fields of a certificate only there.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    shown: Any = client.getpeercert()
    return dict(shown)
