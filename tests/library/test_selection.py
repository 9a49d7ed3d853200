"""The files of a repository that a name selects."""

from __future__ import annotations

import random

import pytest

from edgelm.base.errors import ModelError
from edgelm.library.names import HubReference
from edgelm.library.selection import PREFERRED, Selection, group_ggufs, select_files

GGUF = ["Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q8_0.gguf", "Qwen3-4B-UD-Q4_K_XL.gguf", "README.md", "config.json"]
SPLIT = [f"Q8_0/m-Q8_0-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
BESIDE = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE", "README.md"]
COPIES = ["pytorch_model-00001-of-00002.bin", "original/consolidated.00.pth", "onnx/model.onnx", "tf_model.h5",
          "consolidated.safetensors", "model.fp16-00001-of-00002.safetensors", "modeling_x.py", "logo.png"]  # fmt: skip


def chosen(names: list[str], quantization: str | None = None, file: str | None = None) -> Selection:
    return select_files(HubReference("o/m", quantization, file), dict.fromkeys(names, 10))


def test_a_quantization_is_one_file() -> None:
    assert chosen(GGUF, "Q8_0") == Selection(("Qwen3-4B-Q8_0.gguf",), "Qwen3-4B-Q8_0.gguf", "Q8_0")


def test_without_a_quantization_the_usual_one_is_selected() -> None:
    assert chosen(GGUF).main == "Qwen3-4B-Q4_K_M.gguf"
    assert chosen(GGUF[1:]).main == "Qwen3-4B-UD-Q4_K_XL.gguf"
    assert chosen(["a-F16.gguf", "a-Q8_0.gguf", "a-Q2_K.gguf"]).main == "a-Q8_0.gguf"
    assert chosen(["gpt-oss-20b-mxfp4.gguf"]).main == "gpt-oss-20b-mxfp4.gguf"
    assert chosen(["model.gguf"]).main == "model.gguf"


def test_the_makers_variant_answers_to_the_plain_name() -> None:
    assert chosen(["a-UD-Q2_K_XL.gguf", "a-Q2_K.gguf"], "Q2_K_XL").main == "a-UD-Q2_K_XL.gguf"


def test_a_split_model_is_selected_by_quantization_and_by_any_shard() -> None:
    for selection in (chosen([*SPLIT, *GGUF], "Q8_0"), chosen(SPLIT, file=SPLIT[1]), chosen(SPLIT)):
        if selection.main != "Qwen3-4B-Q8_0.gguf":  # nearer to the root
            assert selection == Selection(tuple(SPLIT), SPLIT[0], "Q8_0")


def test_a_split_model_with_a_missing_shard_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lacks Q8_0/m-Q8_0-00002-of-00003.gguf of 3 shards"):
        chosen([SPLIT[0], SPLIT[2]])


def test_a_projector_is_no_model() -> None:
    assert chosen(["mmproj-Q8_0.gguf", "m-Q8_0.gguf"], "Q8_0").files == ("m-Q8_0.gguf",)
    assert chosen(["mmproj-m-F16.gguf", "m.gguf"], file="mmproj-m-F16.gguf").files == ("mmproj-m-F16.gguf",)


def test_two_models_of_one_quantization_are_refused() -> None:
    with pytest.raises(ModelError, match=r"2 models that match; name one of its files, o/m:FILE, of a-Q8_0"):
        chosen(["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")


def test_a_missing_file_lists_the_existing_ones() -> None:
    with pytest.raises(ModelError, match=r"o/m has no Q5_K_M; it has Q4_K_M, UD-Q4_K_XL, Q8_0"):
        chosen(GGUF, "Q5_K_M")
    with pytest.raises(ModelError, match=r"o/m has no GGUF, so no Q4_K_M; it has "):
        chosen([*SHARDS, *BESIDE], "Q4_K_M")
    with pytest.raises(ModelError, match=r"o/m has no file x.gguf; it has "):
        chosen(GGUF, file="x.gguf")
    with pytest.raises(ModelError, match=r"has no model that edgelm can read; it is empty"):
        chosen([])


@pytest.mark.parametrize("copies", [[], COPIES])
def test_a_folder_is_its_shards_its_tokenizer_and_its_config_and_nothing_twice(copies: list[str]) -> None:
    names = [*SHARDS, "model.safetensors.index.json", *BESIDE, *copies]
    selection = chosen(names)
    assert selection.main == ""
    assert set(selection.files) == {*SHARDS, "model.safetensors.index.json", *BESIDE}


def test_one_safetensors_file_is_a_folder_too() -> None:
    assert chosen(["model.safetensors", "config.json", *COPIES]).files == ("model.safetensors", "config.json")


def test_a_missing_safetensors_shard_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002.safetensors of 2 shards"):
        chosen([SHARDS[0], *BESIDE])


def test_an_adapter_is_chosen_where_there_is_no_model() -> None:
    adapter = ["adapter_config.json", "adapter_model.safetensors"]
    assert chosen([*adapter, "training_args.bin"]).files == tuple(adapter)
    assert set(chosen([*adapter, "model.safetensors", "config.json"]).files) == {"model.safetensors", "config.json"}
    with pytest.raises(ModelError, match=r"has adapter_model.safetensors, but no config.json"):
        chosen(["adapter_model.safetensors"])


def test_any_repository_gives_a_selection_or_one_line() -> None:
    """Random names: selected files exist, complete and once; everything else is a ModelError."""
    source = random.Random(5)
    labels = PREFERRED[:4]
    stems = ["a", "b/a", "mmproj-a", "model", "UD"]
    answers = 0
    for _ in range(2000):
        names: list[str] = []
        for _ in range(source.randrange(6)):
            stem, label, count = source.choice(stems), source.choice(labels), source.randrange(1, 4)
            parts = [f"{stem}-{label}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
            names += source.choice([[f"{stem}-{label}.gguf"], parts, parts[1:], SHARDS, BESIDE, COPIES])
        try:
            selection = chosen(names, source.choice([None, *labels]))
        except ModelError:
            continue
        answers += 1
        assert set(selection.files) <= set(names)
        assert len(set(selection.files)) == len(selection.files)
        assert selection.main in (*selection.files, "")
        if selection.main:
            assert len(group_ggufs(selection.files)) == 1
    assert answers > 200
