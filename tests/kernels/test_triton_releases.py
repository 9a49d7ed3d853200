"""Kernels compile without faults, and compute what they should, with other releases of Triton than the installed one.

`make triton` puts them into folders, and so do `make test` and `make soak` for these; without any, they are skipped.
The installed one compiles here what is known to differ; its other cases are those of test_sass.py and emulated/.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.counts import Count
from tests.kernels.emulated.children import ROOT, TEST_LIMIT_S, lines_of
from tests.kernels.sass import TARGETS, all_figures, table

TAG = "cp{}{}".format(*sys.version_info)  # another Python cannot load their libraries
FOLDERS = sorted(path.parent for path in (ROOT / "build").glob(f"triton-*-{TAG}/ready"))
# What releases compiled wrongly, or differently: products by wgmma, experts, maxima of a cache's groups.
EMULATED = "--main", "--capability", "90", "--only", "dequant_gemm q4_k", "grouped q4_k", "write_kv"
WHOLE = bool(Count(test=0, soak=1))

pytestmark = pytest.mark.timeout(TEST_LIMIT_S)
others = pytest.mark.parametrize("triton", FOLDERS, ids=lambda folder: folder.name)


@others
def test_a_folder_has_the_release_of_its_name(triton: Path) -> None:
    (found,) = distributions(path=[str(triton)], name="triton")
    assert triton.name == f"triton-{found.version}-{TAG}"


@pytest.mark.parametrize("targets", [[target] for target in TARGETS] if WHOLE else [TARGETS], ids=str)
@pytest.mark.parametrize("triton", [None, *FOLDERS], ids=lambda folder: folder.name if folder else "installed")
def test_no_kernel_has_a_fault(triton: Path | None, targets: Sequence[int]) -> None:
    rows = all_figures(targets, only="" if WHOLE and triton else "differing", triton=triton)
    assert rows or (WHOLE and not triton)  # some targets have no case that differs
    bad = [row for row in rows if row.faults()]
    assert not bad, "\n" + table(bad)


@others
def test_results_are_those_of_the_reference(triton: Path) -> None:
    results = lines_of("run", *(["--main"] if WHOLE else EMULATED), triton=triton)
    assert len(results) >= 3
    assert not [f"{result['name']}: {result['fault']}" for result in results if result["fault"]]
