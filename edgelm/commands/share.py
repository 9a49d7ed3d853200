"""`edgelm share`: serve the models here to phones and other computers of this network, with a key and TLS.

Owns the key and the certificate that it makes where the settings have none, and what it prints. serve.py serves.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from edgelm.base.atomic import atomic_write
from edgelm.base.config import Config, load_config
from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.base.machine.wsl import is_wsl
from edgelm.base.runtime import FrontRecord
from edgelm.commands.flags import Flags, SettingsOf, Verbose
from edgelm.commands.serve import start_server
from edgelm.library.local import runs_here
from edgelm.library.names import shown
from edgelm.library.scan import installed
from edgelm.server.access import is_loopback
from edgelm.server.keys import Key, read_key_file
from edgelm.server.own_certificates import NotRenewedError, OwnCertificates

log = logging.getLogger(__name__)

EVERYWHERE = "0.0.0.0"  # noqa: S104 - with a key and TLS only
SOMEWHERE = ("192.0.2.1", 9)  # of RFC 5737: no packet is sent there
MAX_NAMES = 6  # of models
IN_WSL = "             In WSL other machines reach them only if .wslconfig has networkingMode=mirrored under [wsl2]"
NOT_EXPOSED = "Your files, chats and settings are not exposed."
ADMINS = "Keys marked `admin` may also load any model file by its path, and pull and delete models."


def share_models(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="More models to offer.")] = None,
    *,
    flags: Annotated[Flags, SettingsOf("serve")],
    with_key: Annotated[
        bool, typer.Option("--with-key", help="Show the key, also in the QR code: who sees it can use it.")
    ] = False,
    qr: Annotated[bool, typer.Option("--qr/--no-qr", help="Show the address as a QR code.")] = True,
    verbose: Verbose = False,
) -> None:
    """Serve until interrupted, beyond this machine. Raises EdgeLMError."""
    config = load_config(flags)
    own, settings = dict(flags), config.settings
    folder = config.places.config / "share"
    if settings.api_key is not None:  # it may be a short one, and has no mark of an administrator
        message = f"`edgelm share` takes keys from a file only, and {config.sources['api_key']} has api_key"
        raise UsageError(message, "put the key into a file, and give --api-key-file FILE")
    if config.sources["host"] == "default":
        own["host"] = EVERYWHERE
    host = str(own.get("host") or settings.host)
    addresses = _addresses(host)
    if not addresses:
        raise EdgeLMError("this machine is in no network", "connect it, or give --host ADDRESS")
    key_file = Path(settings.api_key_file).expanduser() if settings.api_key_file else folder / "keys.txt"
    if settings.api_key_file is None:
        own["api_key_file"] = str(key_file)
        _make_key(key_file)
    keys = read_key_file(key_file)
    key = _key_to_show(keys, key_file) if with_key else ""
    trust = [f"certificate  {settings.tls_cert}, as it is configured"]
    renew = None
    if settings.tls_cert is None:
        certificates = OwnCertificates(folder)
        names = ["127.0.0.1", "localhost", *_host_names()]
        try:
            is_new = certificates.renew(socket.gethostname(), [*addresses, *names])
        except NotRenewedError as error:
            log.warning("warning: %s", error)
            is_new = False
        renew = partial(_renew, certificates, host, names)
        own |= {"tls_cert": str(certificates.server), "tls_key": str(certificates.key)}
        trust = [
            f"certificate  {certificates.authority} ({'new: ' if is_new else ''}clients have to trust it, once each)",
            f"             SHA-256 {certificates.fingerprint}",
        ]
    only_here = f"             Nobody else is let in: {config.sources['host']} has the host {settings.host}"
    lines = [
        *([only_here] if is_loopback(addresses[0]) else [IN_WSL] if is_wsl() else []),
        f"key          {key or f'in {key_file}'}",
        *trust,
        f"exposed      {_exposed(models or [], config)}",
        f"             Who has the key may ask them. {ADMINS if any(key.admin for key in keys) else NOT_EXPOSED}",
        "To trust the certificate on phones, Windows and others: docs/machines.md. curl: --cacert FILE",
    ]
    announce = partial(_announce, addresses=addresses, lines=lines, key=key, qr=qr)
    start_server(models or [], own, verbose=verbose, say=announce, renew=renew)


def _renew(certificates: OwnCertificates, host: str, names: list[str]) -> None:
    """Make the certificate of a running server again if it ends soon or an address is new. Raises EdgeLMError.

    The machine's names stay those of the start: another name may need a new authority, which no client trusts yet.
    """
    addresses = _addresses(host)
    if addresses and certificates.renew(socket.gethostname(), [*addresses, *names]):
        message = f"{certificates.authority} was made again: clients have to trust it, once each"
        log.warning("warning: %s; SHA-256 %s", message, certificates.fingerprint)


def _announce(front: FrontRecord, *, addresses: list[str], lines: list[str], key: str, qr: bool) -> None:
    """Print how clients reach the server."""
    port = urlsplit(front.address).port
    names = addresses if is_loopback(addresses[0]) else [*addresses, *_host_names()[:1]]
    urls = [f"https://{f'[{name}]' if ':' in name else name}:{port}/v1" for name in names]
    print("edgelm shares the models of this machine with its network (Ctrl-C ends it)\n")
    print(f"address      {urls[0]}", *(f"             {url}" for url in urls[1:]), *lines, sep="\n")
    if qr:
        import segno

        print(f"\nQR code: the address{', and below it the key' if key else ''}")
        segno.make(qr_text(urls[0], key), error="l", micro=False).terminal(compact=True)
    sys.stdout.flush()


def qr_text(url: str, key: str) -> str:
    """Return what a QR code has: the address, and in a second line the key if there is one, as a text to copy."""
    return f"{url}\n{key}" if key else url


def _make_key(file: Path) -> None:
    """Write a key file, unless there is one. Raises EdgeLMError."""
    try:
        if not file.exists():
            atomic_write(file, f"share {secrets.token_urlsafe(24)}\n".encode())
    except OSError as error:
        raise EdgeLMError(f"{file} cannot be used: {error.strerror}", "give --api-key-file FILE") from None


def _key_to_show(keys: list[Key], file: Path) -> str:
    """Return the first key that is no administrator's. Raises UsageError."""
    for key in keys:
        if not key.admin:
            return key.secret
    raise UsageError(f"{file} has only keys marked `admin`, which are not shown", "add a line `NAME KEY` to it")


def _addresses(host: str) -> list[str]:
    """Return the addresses by which others reach a server that listens at `host`; none: it is in no network."""
    if host not in (EVERYWHERE, "::"):
        return [host]
    found: dict[str, None] = {}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(SOMEWHERE)  # chooses the way, and so the address
        found[probe.getsockname()[0]] = None
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
            found[str(address[0])] = None
    return [address for address in found if not is_loopback(address)]


def _host_names() -> list[str]:
    """Return the names by which a network may know this machine, first that of multicast DNS; only DNS names.

    Not the domain: it changes with the network, and clients would have to trust a new authority each time.
    """
    short = socket.gethostname().lower().partition(".")[0]
    return [f"{short}.local", short] if re.fullmatch(r"[a-z0-9-]{1,63}", short) else []


def _exposed(models: list[str], config: Config) -> str:
    here = [model.name for model in installed(config.places.hub, (), config.model_folders) if runs_here(model)]
    return shown(", ".join(_few([*models, *here])) or "no model: pull one with `edgelm pull`") + _remote(config)


def _few(names: list[str]) -> Iterator[str]:
    names = list(dict.fromkeys(names))
    yield from names[:MAX_NAMES]
    if len(names) > MAX_NAMES:
        yield f"{len(names) - MAX_NAMES} more"


def _remote(config: Config) -> str:
    names = [table.name for table in config.models if table.remote]
    return shown(f"; and of other servers, at your cost: {', '.join(_few(names))}") if names else ""
