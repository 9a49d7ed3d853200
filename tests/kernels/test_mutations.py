"""The list of mutations is up to date: `python -m tests.kernels.mutations` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: f"{each.file}: {each.what}")
def test_each_mistake_has_its_place_and_its_tests(mutation):
    changed = mutation.text(ROOT)
    assert changed != (ROOT / mutation.file).read_text(encoding="utf-8")
    assert all((ROOT / name.split("::")[0]).exists() for name in mutation.tests.split() if not name.startswith("-"))


def test_no_mutation_is_there_twice():
    assert len({(each.file, each.old, each.new) for each in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("old", ["nowhere in it", "import"])
def test_text_that_is_not_there_once_is_told(old):
    with pytest.raises(ValueError, match="occurs"):
        Mutation("kernels/layout.py", "what", old, "", "tests").text(ROOT)
