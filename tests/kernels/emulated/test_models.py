"""Whole models through emulated kernels have the tokens of the reference on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from edgelm.kernels.cache import FORMATS
from tests.counts import Count
from tests.kernels.emulated.children import TEST_LIMIT_S, lines_of
from tests.kernels.emulated.models import ARCHITECTURES, MAIN
from tests.kernels.emulated.walks import FAMILIES

WHOLE = bool(Count(test=0, soak=1))
pytestmark = pytest.mark.timeout(TEST_LIMIT_S)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Run the models of every test run; with --soak, all."""
    return lines_of("models", *([] if WHOLE else ["--main"]))


def test_tokens_and_logits_are_those_of_the_reference(results: list[dict[str, Any]]) -> None:
    everything = {(family, kv, capability) for family in FAMILIES for kv in FORMATS for capability in ARCHITECTURES}
    seen = {(*result["case"].split(), result["capability"]) for result in results}
    assert seen == (everything if WHOLE else set(MAIN))
    faults = [f"{result['case']} sm_{result['capability']}: {result['fault']}" for result in results if result["fault"]]
    assert not faults, "\n".join(faults)


def test_steps_launch_the_kernels_of_prompts_decoding_and_sampling(results: list[dict[str, Any]]) -> None:
    for result in results:
        kernels = set(result["kernels"])
        assert kernels >= {"attend_tiles", "attend_chunks", "decode_kernel", "dequant_gemm_kernel", "write_kv_kernel"}
        assert kernels >= {"draw_kernel", "penalize_kernel"}
        assert ("few_pairs_kernel" in kernels) == result["case"].startswith("mixture")
