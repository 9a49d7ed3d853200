"""The catalogue: its entries are consistent, and misspelt names get suggestions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import llama_cpp
import pytest
from gguf.constants import LlamaFileType

from edgelm.base.errors import ModelError
from edgelm.library.catalog import entries, entry_of, find_entry, hub_reference, name_of, near_names
from edgelm.library.names import CatalogName, HubReference

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    "qwen3 qwen3.5 qwen2.5-coder llama3.1 llama3.2 llama3.3 gemma2 gemma3 gemma3n gemma4 phi4 mistral mistral-nemo "
    "mistral-small ministral smollm2 smollm3 deepseek-r1 gpt-oss granite4 olmo2 tinyllama command-r7b falcon3 "
    "exaone4 glm4"
).split()


def test_it_has_the_popular_families_in_all_sizes() -> None:
    catalog = entries()
    assert len(catalog) >= 40
    assert {entry.family for entry in catalog} >= set(FAMILIES)
    sizes = [entry.parameters for entry in catalog]
    assert min(sizes) < 3e8
    assert max(sizes) > 1.1e11
    assert {"0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b"} <= {e.size for e in catalog if e.family == "qwen3"}
    assert any(entry.gated for entry in catalog)


def test_each_entry_is_complete_and_unique() -> None:
    catalog = entries()
    assert len({entry.name for entry in catalog}) == len(catalog)
    assert len({entry.repository.casefold() for entry in catalog}) == len(catalog)
    for entry in catalog:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repository)
        assert hub_reference(entry.name) == HubReference(entry.repository, entry.quantization)
        assert name_of(entry.repository, entry.quantization) == entry.name
        assert len(entry.good_at) < 80, entry.name
        assert entry.licence == entry.licence.strip()


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_size_fits_the_quantization(entry: object) -> None:
    bits = {
        "Q4_0": (4.4, 7),
        "Q4_1": (5, 6),
        "Q4_K_M": (4.5, 6.7),
        "UD-Q4_K_M": (4.5, 6),
        "UD-Q4_K_XL": (4.4, 6),
        "Q8_0": (8.4, 9),
        "MXFP4": (4.2, 5),
    }
    low, high = bits[entry.quantization]  # type: ignore[attr-defined]
    assert low <= 8 * entry.nbytes / entry.parameters <= high  # type: ignore[attr-defined]


def test_llama_cpp_knows_every_architecture() -> None:
    folder = Path(llama_cpp.__file__).parent / "lib"
    library = next(path for path in sorted(folder.iterdir()) if path.name.startswith("libllama."))
    data = library.read_bytes()
    missing = {entry.architecture for entry in entries() if entry.architecture.encode() + b"\0" not in data}
    assert not missing


def test_llama_cpp_knows_every_quantization() -> None:
    known = {re.sub("^(ALL|MOSTLY)_", "", kind.name) for kind in LlamaFileType} | {"MXFP4", "Q4_K_XL"}
    assert {entry.quantization.removeprefix("UD-") for entry in entries()} <= known


def test_a_family_alone_is_its_default_and_quantizations_can_be_chosen() -> None:
    assert hub_reference("qwen3") == hub_reference("qwen3:4b") == HubReference("Qwen/Qwen3-4B-GGUF", "Q4_K_M")
    assert hub_reference("qwen3:4b:q8_0") == hub_reference("qwen3:Q8_0") == HubReference("Qwen/Qwen3-4B-GGUF", "Q8_0")
    assert hub_reference("a/b:Q8_0@v1") == HubReference("a/b", "Q8_0", None, "v1")
    entry = entry_of("qwen/qwen3-4b-gguf")
    assert entry is not None
    assert name_of(entry.repository, "q6_k") == "qwen3:4b:Q6_K"
    assert name_of("a/b", "Q4_K_M") is None


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("quen3:4b", "qwen3:4b"),
        ("qwen", "qwen3:4b"),
        ("lama3.2", "llama3.2:3b"),
        ("phi-4", "phi4:14b"),
        ("gptoss", "gpt-oss:20b"),
        ("deepseek", "deepseek-r1:8b"),
        ("mistral-7b", "mistral:7b"),
        ("smolm2:360m", "smollm2:360m"),
    ],
)
def test_a_misspelt_name_gets_similar_ones(typed: str, offered: str) -> None:
    with pytest.raises(ModelError) as caught:
        hub_reference(typed)
    assert "did you mean" in caught.value.hint
    assert offered in caught.value.hint


def test_an_unknown_size_lists_the_sizes_of_the_family() -> None:
    with pytest.raises(ModelError) as caught:
        find_entry(CatalogName("gpt-oss", "12b"))
    assert "gpt-oss:20b, gpt-oss:120b" in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "expected"), [("starter", "comes with edgelm"), ("./x.gguf", "a path"), ("zzzzzz", "edgelm pull")]
)
def test_names_that_are_not_on_the_hub(typed: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        hub_reference(typed)
    assert near_names("zzzzzz") == []


def test_the_catalogue_is_installed_with_the_package() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "catalog.toml" in pyproject["tool"]["setuptools"]["package-data"]["edgelm.library"]
