"""Which addresses belong to the public Internet: the rule for what is fetched for a text or a client."""

from __future__ import annotations

import ipaddress

_PUBLIC_V6 = ipaddress.ip_network("2000::/3")  # without mapped, translated, private and local ones
_TUNNELS = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32")))  # these hold an IPv4 address


def is_public(address: str) -> bool:
    """Tell whether an address is one of the Internet, and no other in disguise."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and (ip not in _PUBLIC_V6 or any(ip in tunnel for tunnel in _TUNNELS)):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)
