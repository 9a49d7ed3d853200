"""Which addresses are public: one rule for pages and for pictures."""

from __future__ import annotations

import pytest

from edgelm.base.public_addresses import is_public

NOT_PUBLIC = (
    "127.0.0.1", "127.255.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "fd00::1", "ff02::1",
    "ff0e::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1",
    "2002:7f00:1::", "2001::1", "2001:db8::1",
)  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)
