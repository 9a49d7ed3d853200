"""The running server that a command looks at: this user's own, or another one.

Owns the rule which key goes to which server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import find_front
from edgelm.client.addresses import normalize_address

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its address, and the headers and certificates for its clients."""

    address: str
    headers: dict[str, str]
    verify: ssl.SSLContext | bool
    is_own: bool  # this user's, on this machine


def chosen_server(endpoint: str | None, api_key: str | None) -> Server:
    """Return the server at `endpoint`, or this user's own. Raises EdgeLMError if there is none."""
    config = load_config({})
    if endpoint is not None and api_key is None and config.sources["api_key"].startswith("EDGELM_"):
        api_key = config.settings.api_key  # the key in config.toml is for our own server
    front = find_front(config.places.runtime, config.library)
    headers: dict[str, str] = {}
    verify: ssl.SSLContext | bool = True
    if endpoint is not None:
        address = normalize_address(endpoint).removesuffix("/v1")
    elif front is not None:
        address, headers, verify = front.address, front.headers, front.tls()
    else:
        raise EdgeLMError("no edgelm server is running", "start one with `edgelm serve`, or give --endpoint URL")
    if api_key is not None:
        headers = {"authorization": f"Bearer {api_key}"}
    return Server(address, headers, verify, is_own=endpoint is None)
