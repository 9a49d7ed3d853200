"""The list of mutations is up to date; `python -m tests.kernels.mutations` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_each_mutation_applies_and_its_tests_exist(mutation):
    assert mutation.apply(ROOT) != (ROOT / mutation.file).read_text(encoding="utf-8")
    assert all((ROOT / name.split("::")[0]).exists() for name in mutation.tests.split() if not name.startswith("-"))


def test_no_mutation_is_listed_twice():
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("old", ["nowhere in it", "import"])
def test_text_that_does_not_occur_once_is_an_error(old):
    with pytest.raises(ValueError, match="occurs"):
        Mutation("kernels/layout.py", "mistake", old, "", "tests").apply(ROOT)
