"""The list of mutations is up to date; `python -m tests.engine.mutations` runs them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine import mutations
from tests.engine.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that may be changed."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "edgelm" / "engine", folder / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_applies(package: Path, mutation: Mutation) -> None:
    (module,) = package.rglob(f"{mutation.module}.py")
    text = module.read_text(encoding="utf-8")
    mutation.apply(package)
    assert module.read_text(encoding="utf-8") != text
    module.write_text(text, encoding="utf-8")


def test_no_mutation_is_listed_twice() -> None:
    assert len({(mutation.module, mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("words", [["schedular"], ["scheduler", "schedular"]])
def test_a_word_of_no_mutation_is_refused_before_any_test_runs(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "measured_limits", lambda: pytest.fail("the tests ran"))
    with pytest.raises(SystemExit, match=r"schedular.*scheduler"):
        mutations.main(words)
