"""The sampling that a model's files recommend: the names in both formats, and values of hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.recommended import folder_sampling, gguf_sampling

GIVEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01}


def test_the_keys_of_a_gguf(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_k(20)
    writer.add_sampling_top_p(0.95)  # a float32, which is 0.949999988
    writer.add_sampling_min_p(0.01)
    writer.add_sampling_penalty_repeat(1.05)
    writer.add_sampling_penalty_last_n(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with open_gguf(tmp_path / "m.gguf") as gguf:
        assert gguf_sampling(gguf.metadata) == GIVEN


def test_a_folders_file(tmp_path: Path) -> None:
    assert folder_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(GIVEN | {"do_sample": True, "eos_token_id": 2}))
    assert folder_sampling(tmp_path) == GIVEN


def test_a_folder_that_does_not_sample_by_default_has_no_greedy_chats(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": null, "top_p": 0.9}')
    assert folder_sampling(tmp_path) == {"top_p": 0.9}


def test_a_temperature_of_zero_is_meant() -> None:
    assert gguf_sampling({"general.sampling.temp": 0.0}) == {"temperature": 0}


@pytest.mark.parametrize("value", [-1, -1.0])
def test_no_limit_of_the_likeliest_tokens_is_off(value: float) -> None:
    assert gguf_sampling({"general.sampling.top_k": value}) == {"top_k": 0}


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1, "top_k": -2, "top_p": 0, "min_p": 1.0},
        {"temperature": 1e30, "top_k": 2**31, "top_p": 1.01, "min_p": -1},
        dict.fromkeys(GIVEN, float("nan")),
        dict.fromkeys(GIVEN, float("inf")),
        dict.fromkeys(GIVEN, True),
        dict.fromkeys(GIVEN, "0.5"),
        {name: [0.5] for name in GIVEN},
        {name: {"a": 1} for name in GIVEN},
        dict.fromkeys(GIVEN, 10**4000),
        {"top_k": 2.5},
    ],
    ids=lambda values: str(next(iter(values.values())))[:12],
)
def test_values_that_cannot_be_meant_are_ignored(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert folder_sampling(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', '{"temperature": ' + "[" * 10**5])
def test_a_file_that_is_damaged_recommends_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    assert folder_sampling(tmp_path) == {}
