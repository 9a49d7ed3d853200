"""The folder of a BERT as a GGUF: tokens and vectors of transformers, the file that is kept, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoModel

from edgelm.backends.build import build
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.workers.messages import EngineJob
from edgelm.checkpoints.encoder import encoder_config
from edgelm.checkpoints.folder import folder_summary
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.jobs.embed import Embeddings
from edgelm.jobs.embed_request import EmbedRequest
from edgelm.making.conversion.convert import KEPT, convert_folder, kept_gguf
from edgelm.models.config import folder_problem
from tests.bert_folders import WORDS, bert_folder, write_wordpiece
from tests.counts import Count
from tests.making.conversion.test_vocabulary import llama_tokenizer

TEXTS = Count(test=150, soak=5000)
ALPHABET = (
    "the cat dogs sitting É é e\u0301 İ Σ 日本 한국어 कि ही \x0b\x0c\x00\ufffd \u00ad\u200b\u3000 ABC Xyz 12.5 a'b — « "
    "🙂 \t\n"
)


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    words = [*ALPHABET.split(" "), "x" * 100, "x" * 101]
    return ["", " ", *("".join(rng.choices([*words, *ALPHABET, " ", " "], k=rng.randint(1, 25))) for _ in range(TEXTS))]


@pytest.mark.parametrize("lowers", [True, False])
@pytest.mark.parametrize("strips", [None, True, False])
def test_texts_are_split_as_by_the_folders_tokenizer(tmp_path: Path, lowers: bool, strips: bool | None) -> None:
    write_wordpiece(tmp_path, normalizer={"lowercase": lowers, "strip_accents": strips})
    own, tokenizer = RustTokenizer.from_file(str(tmp_path / "tokenizer.json")), llama_tokenizer(tmp_path, len(WORDS))
    for text in texts(seed=5):
        assert tokenizer.encode(text, special=False, bos=True, unknown=True) == own.encode(text).ids, repr(text)


def test_the_tokens_around_a_text_are_no_text_of_a_user(tmp_path: Path) -> None:
    write_wordpiece(tmp_path)
    tokenizer = llama_tokenizer(tmp_path, len(WORDS))
    for text in ("[SEP]", "é [CLS] [UNK]"):
        inner = tokenizer.encode(text, special=False, bos=True, unknown=True)[1:-1]
        assert not {WORDS.index("[SEP]"), WORDS.index("[CLS]")} & set(inner), text


def plain(folder: Path) -> None:
    """Leave the folder as it is."""


def older_names(folder: Path) -> None:
    """Write the names of the tensors as the first models had them."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): data
        for name, data in tensors.items()
    }
    save_file({**renamed, "cls.predictions.bias": torch.zeros(4)}, folder / "model.safetensors")


def half(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: data.half() for name, data in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("change", [plain, older_names, half])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", ""])
async def test_vectors_are_those_of_transformers(tmp_path: Path, pooling: str, change: Callable[[Path], None]) -> None:
    folder = bert_folder(tmp_path / "bert", pooling)
    model = AutoModel.from_pretrained(folder).eval()
    change(folder)
    with open_safetensors(folder) as opened:
        assert folder_summary(opened).kind == "embedding"
    assert not folder_problem(folder)
    file = kept_gguf(folder, tmp_path)
    loaded = build(EngineJob(model=file, settings=Settings(threads=1)))
    try:
        inputs = ["the cat sat on a mat", "한국어 कि", "rain in berlin, " * 40]
        ours = (await Embeddings(loaded).embed(EmbedRequest(inputs=inputs))).vectors
    finally:
        loaded.engine.close()
    own = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    for text, vector in zip(inputs, ours, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([own.encode(text).ids])).last_hidden_state[0]
        expected = (hidden[0] if pooling == "cls_token" else hidden.mean(0)).numpy()
        assert vector @ expected / np.linalg.norm(expected) >= 0.99999


def test_a_gguf_is_kept_until_the_folder_changes(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "bert")
    first = kept_gguf(folder, tmp_path)
    made = first.stat().st_ino
    assert kept_gguf(folder, tmp_path) == first
    assert first.stat().st_ino == made
    modes = json.loads((folder / "1_Pooling" / "config.json").read_text())
    modes |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert kept_gguf(folder, tmp_path) != first
    for number in range(KEPT):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-12 * (number + 2)}))
        newest = kept_gguf(folder, tmp_path)
    left = set((tmp_path / "converted").glob("*.gguf"))
    assert len(left) == KEPT
    assert newest in left
    assert first not in left


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu"}, "its activation is"),
        ({"position_embedding_type": "relative_key"}, "its positions are"),
        ({"is_decoder": True}, "it is a decoder"),
        ({"architectures": ["BertForSequenceClassification"]}, "it is a classifier"),
        ({"model_type": "xlm-roberta"}, "of encoders, edgelm runs only BERT from a folder, and this is xlm-roberta"),
        ({"model_type": "roberta"}, "of encoders, edgelm runs only BERT"),
    ],
)
def test_other_encoders_are_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = bert_folder(tmp_path / "bert", **changes)
    assert reason in folder_problem(folder)
    with pytest.raises(ModelError, match=reason):
        convert_folder(folder, tmp_path / "out.gguf")


def test_other_poolings_and_modules_are_refused(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "bert", "max_tokens")
    assert "pooled by max_tokens" in folder_problem(folder)
    with pytest.raises(ModelError, match="pooled by max_tokens"):
        convert_folder(folder, tmp_path / "out.gguf")
    dense = bert_folder(tmp_path / "dense")
    (dense / "2_Dense").mkdir()
    assert "the module Dense" in folder_problem(dense)
    with pytest.raises(ModelError, match="the module Dense"):
        encoder_config(dense, json.loads((dense / "config.json").read_text()))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalized by other steps"),
        ({"normalizer": {"handle_chinese_chars": False}}, "Chinese words"),
        ({"splitter": "WhitespaceSplit"}, "split by other steps"),
    ],
)
def test_another_tokenizer_is_refused(tmp_path: Path, how: dict[str, Any], reason: str) -> None:
    folder = bert_folder(tmp_path / "bert")
    write_wordpiece(folder, **how)
    with pytest.raises(ModelError, match=reason):
        convert_folder(folder, tmp_path / "out.gguf")


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "bert", intermediate_size=95)
    with pytest.raises(ModelError, match=r"tensor encoder\.layer\.0\.intermediate"):
        convert_folder(folder, tmp_path / "out.gguf")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("embeddings.word_embeddings.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="no tensor embeddings"):
        convert_folder(folder, tmp_path / "out.gguf")
