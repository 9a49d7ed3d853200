"""The workarounds for Triton 3.6 give right results as well; no Triton 3.6 is needed."""

from __future__ import annotations

import pytest

from tests.kernels.emulated.children import TEST_LIMIT_S, lines_of


@pytest.mark.timeout(TEST_LIMIT_S)
def test_kernels_for_older_releases_of_triton() -> None:
    keys, hopper, ada = lines_of("older_triton")
    assert not [line["fault"] for line in (keys, hopper, ada) if line["fault"]]
    assert (hopper["ahead"], hopper["waits"]) == (0, ["0"])  # each product is waited for before the next operands
    assert (ada["ahead"], ada["waits"]) == (1, [])  # mma.sync, which reads its operands at once, may load ahead
