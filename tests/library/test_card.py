"""A model as other programs read it, from its headers: capabilities, template, metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.jobs.reader import read_card
from tests.tiny import write_tiny

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.mark.parametrize(
    ("template", "control", "capabilities"),
    [
        (None, (), ["completion"]),
        ("{{ messages }}", (), ["completion", "tools"]),
        ("{{ messages }}<think></think>", FIM, ["completion", "tools", "thinking", "insert"]),
    ],
)
def test_capabilities(tmp_path: Path, template: str | None, control: tuple[str, ...], capabilities: list[str]) -> None:
    card = read_card(write_tiny(tmp_path / "m.gguf", chat_template=template, control=control))
    assert card["capabilities"] == capabilities
    assert card["template"] == template


def test_metadata_has_no_long_lists(tmp_path: Path) -> None:
    info = read_card(write_tiny(tmp_path / "m.gguf", context=777))["model_info"]
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 777)
    assert info["general.parameter_count"] > 0
    assert not [name for name in info if name.startswith("tokenizer.")]


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF nothing")
    assert read_card(tmp_path / "m.gguf").keys() == {"error"}
