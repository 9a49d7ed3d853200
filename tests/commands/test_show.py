"""`edgelm show`: a model's details as text and as JSON, and one clear line for a damaged file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.commands.show import show_model
from edgelm.evaluation.kept import KeptResults
from edgelm.jobs.reader import content_identity, read_details
from edgelm.library.readers import Detail, read_each
from tests.checkpoints import test_safetensors_fuzz as folders
from tests.checkpoints.gguf_bytes import RawGGUF
from tests.checkpoints.safetensors_bytes import CONFIG, folder_files, write_folder
from tests.checkpoints.small_models import FAMILIES, key
from tests.checkpoints.test_gguf_fuzz import Base, mutate
from tests.counts import Count
from tests.evaluation.rows import kept_model
from tests.library.hub_folders import put
from tests.library.projector_file import write_projector
from tests.odd_models import write_odd
from tests.tiny import write_tiny

MUTANTS = Count(test=300, soak=20_000)
IN_CHILD = Count(test=40, soak=1_000)
QWEN = "Qwen/Qwen3-4B-GGUF"
TEMPLATE = "\n".join(f"line {i} {{{{ x }}}}" for i in range(20)) + "\x1b[2J"


def shown(capsys: pytest.CaptureFixture[str], name: str | Path) -> dict[str, Any]:
    show_model(str(name), {}, template=False, as_json=True)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def text(capsys: pytest.CaptureFixture[str], name: str | Path, *, template: bool = False) -> str:
    show_model(str(name), {}, template=template, as_json=False)
    return capsys.readouterr().out


def test_a_gguf(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_tiny(home / "t.gguf", arch="qwen3", quant="q8_0", context=777, chat_template=TEMPLATE).read_bytes()
    put(home / "hub", QWEN, {"Qwen3-4B-Q4_K_M.gguf": data})
    document = shown(capsys, "qwen3:4b")
    assert document["name"] == "qwen3:4b"
    assert document["title"] == "tiny qwen3 q8_0"
    assert (document["architecture"], document["quantization"], document["context"]) == ("qwen3", "Q8_0", 777)
    assert document["tokenizer"] == {
        "kind": "llama",
        "tokens": 512,
        "special": {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"},
    }
    assert document["template"] == TEMPLATE
    assert document["licence"] == "Apache-2.0", "from the catalogue, as the file has none"
    assert document["bytes"] == len(data)
    assert {row["type"] for row in document["tensor_types"]} == {"Q8_0", "F32"}
    assert sum(row["parameters"] for row in document["tensor_types"]) == document["parameters"]
    assert document["memory"]["total_bytes"] > document["memory"]["weights_bytes"] > 0
    assert document["memory"]["context"] == 777
    assert document["problem"] is None
    out = text(capsys, "qwen3:4b")
    assert "\x1b" not in out
    assert "14 more lines: --template" in out
    for words in ("qwen3, 2 layers", "512 tokens", "bos <s>", "Apache-2.0", "about", "never", "(hub cache)", "Q8_0  "):
        assert words in out, words
    assert text(capsys, "qwen3:4b", template=True) == TEMPLATE.replace("\x1b", "\ufffd") + "\n"


def test_how_answers_are_sampled_and_who_says_so(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(home / "m.gguf", temperature=0.6)
    monkeypatch.setenv("EDGELM_TOP_K", "30")
    sampling = shown(capsys, path)["sampling"]
    assert sampling["temperature"] == {"value": 0.6, "source": "the file"}
    assert sampling["top_k"] == {"value": 30, "source": "EDGELM_TOP_K"}
    assert sampling["top_p"] == {"value": 0.95, "source": "default"}
    assert "temperature 0.6 (the file), top_k 30 (EDGELM_TOP_K), top_p 0.95 (default)" in text(capsys, path)
    monkeypatch.setenv("EDGELM_TEMPERATURE", "0.1")
    assert shown(capsys, path)["sampling"]["temperature"] == {"value": 0.1, "source": "EDGELM_TEMPERATURE"}


def test_a_layer_that_drafts_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for heads, named in ((0.0, True), (None, False)):
        path = write_odd(home / "m.gguf", "qwen35", heads=heads)
        assert bool(shown(capsys, path)["mtp_heads"]) is named
        assert ("(--draft mtp)" in text(capsys, path)) is named


def test_the_file_of_heads_beside_a_model_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_odd(home / "m-Q8_0.gguf", "qwen35", heads=0.0, part="model")
    assert shown(capsys, model)["heads"] is None
    heads = write_odd(home / "mtp-m-Q8_0.gguf", "qwen35", heads=0.0, part="heads")
    document = shown(capsys, model)
    assert document["heads"]["path"] == str(heads)
    assert (document["files"], document["bytes"]) == (2, model.stat().st_size + heads.stat().st_size)
    assert "by mtp-m-Q8_0.gguf: a layer that predicts" in " ".join(text(capsys, model).split())
    assert "holds only the heads that draft for a model" in " ".join(text(capsys, heads).split())
    write_odd(heads, "qwen35moe", heads=0.0, part="heads")
    assert "does not hold the heads of this model" in " ".join(text(capsys, model).split())


def test_measured_results_are_shown_until_the_file_changes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "m.gguf"
    write_tiny(path)
    with open_gguf(path) as gguf:
        KeptResults(home / "data").keep(kept_model(content_identity(gguf)))
    assert "99.1 % same next token as m-F16, KL 0.012, perplexity 5.125; on wiki.txt, 2026-11-23" in text(capsys, path)
    assert "10 tokens/s, prompts 100 tokens/s; llama on cpu, 2026-11-23" in text(capsys, path)
    document = shown(capsys, path)
    assert (document["evaluations"][0]["text"], document["evaluations"][0]["mean_kl"]) == ("wiki.txt", 0.0123)
    assert document["speeds"][0]["decode_tokens_per_second"] == 10
    assert "identity" not in document
    with open_gguf(path) as gguf:
        KeptResults(home / "data").keep(kept_model(content_identity(gguf), distinguishable=False))
    assert "KL 0.012 (noise), perplexity" in text(capsys, path)
    write_tiny(path, seed=1)
    assert "same next token" not in text(capsys, path)


def test_the_files_own_licence_comes_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = FAMILIES["llama"].with_keys(general__license=key("mit"))
    put(home / "hub", QWEN, {"Qwen3-4B-Q4_K_M.gguf": raw.to_bytes()})
    assert shown(capsys, "qwen3:4b")["licence"] == "mit"
    raw = raw.with_keys(general__license=key("other"), general__license__name=key("Some Terms"))
    (home / "m.gguf").write_bytes(raw.to_bytes())
    assert shown(capsys, home / "m.gguf")["licence"] == "Some Terms"
    (home / "m.gguf").write_bytes(FAMILIES["llama"].to_bytes())
    assert shown(capsys, home / "m.gguf")["licence"] is None


def test_a_folder_of_safetensors(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|end|>",
        "bos_token": {"content": "<|start|>"},
        "pad_token": None,
        "chat_template": "from the config",
    }
    more = {
        "tokenizer_config.json": json.dumps(config).encode(),
        "README.md": b"---\ntags:\n- x\nlicense: other\nlicense_name: some-terms\n---\nlicense: not this",
    }
    folder = write_folder(home / "m", folder_files(CONFIG | {"head_dim": 8}) | more)
    document = shown(capsys, folder)
    assert document["format"] == "safetensors"
    assert document["tokenizer"] == {
        "kind": "Qwen2Tokenizer",
        "tokens": 24,
        "special": {"eos": "<|end|>", "bos": "<|start|>"},
    }
    assert document["template"] == "from the config"
    assert document["licence"] == "some-terms"
    assert [row["type"] for row in document["tensor_types"]] == ["BF16"]
    assert document["problem"] is None
    assert document["memory"]["context"] == document["context"]  # the torch engine's choice
    assert "tokens of context" in text(capsys, folder)
    (folder / "chat_template.jinja").write_text("from its own file")
    (folder / "README.md").unlink()
    assert text(capsys, folder, template=True) == "from its own file\n"
    assert shown(capsys, folder)["licence"] is None


def test_a_model_that_cannot_run_shows_the_reason(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(home / "vocab.gguf", vocab_only=True)
    assert "only a vocabulary" in shown(capsys, home / "vocab.gguf")["problem"]
    assert "cannot be run" in text(capsys, home / "vocab.gguf")


def test_a_missing_template_is_one_line(home: Path) -> None:
    write_tiny(home / "m.gguf")
    with pytest.raises(EdgeLMError, match="has no chat template"):
        show_model(str(home / "m.gguf"), {}, template=True, as_json=False)


@pytest.mark.parametrize("name", ["absent.gguf", "qwen3:4b", "quen3", ".", "/dev/null"])
def test_a_missing_model_is_one_line(home: Path, name: str) -> None:
    with pytest.raises(EdgeLMError) as caught:
        show_model(name, {}, template=False, as_json=True)
    assert str(caught.value).isprintable()


# -- damaged files ---------------------------------------------------------------------------------------------------


def bases() -> list[Base]:
    more: dict[str, Any] = {"general__license": key("mit"), "tokenizer__chat_template": key("{{ x }}")}
    more |= {"tokenizer__ggml__bos_token_id": key(1), "tokenizer__ggml__pre": key("default")}
    raws: list[RawGGUF] = [FAMILIES[name].with_keys(**more) for name in ("llama", "deepseek2", "lfm2", "deci")]
    return [Base(raw) for raw in raws]


def check(answer: dict[str, Any]) -> bool:
    """Return whether an answer is a document; otherwise it is one line."""
    json.dumps(answer)
    if "error" in answer:
        assert answer["error"].isprintable()
        assert len(answer["error"]) < 500
        return False
    assert answer["tensor_types"] is not None
    return True


def test_a_mutated_file_gives_an_answer_or_one_clear_line(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, true, path = random.Random(seed), bases(), tmp_path / "m.gguf"
    answered = 0
    for i in range(MUTANTS):
        data = mutate(rng.choice(true), rng)
        path.write_bytes(data)
        try:
            answered += check(read_details(path, Settings()))
        except BaseException:
            print(f"mutant {i} of seed {seed}: {data!r}")
            raise
    print(f"{answered} of {MUTANTS} answered")
    assert 0 < answered < MUTANTS


def test_a_mutated_folder_gives_an_answer_or_one_clear_line(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, answered = random.Random(seed), 0
    true = folder_files(
        tokenizer_config__json=b'{"eos_token": {"content": "x"}, "chat_template": [{"name": "default"}]}'
    )
    for i in range(MUTANTS // 2):
        folder = write_folder(tmp_path / str(i), folders.mutate(dict(true), rng))
        answered += check(read_details(folder, Settings()))
    assert 0 < answered < MUTANTS // 2


@pytest.mark.parametrize("kind", [{}, [["llama"]], 7, None])
def test_a_kind_of_model_that_is_no_text_gives_an_answer_or_one_clear_line(tmp_path: Path, kind: object) -> None:
    folder = write_folder(tmp_path / "m", folder_files(CONFIG | {"model_type": kind}))
    check(read_details(folder, Settings()))


def test_mutated_files_as_the_command_reads_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, true = random.Random(seed := random.randrange(2**32)), bases()
    print(f"seed {seed}")
    files = []
    for i in range(IN_CHILD):
        (home / f"{i}.gguf").write_bytes(mutate(rng.choice(true), rng))
        files.append(Detail(home / f"{i}.gguf", Settings()))
    answers = list(read_each(files))
    assert len(answers) == IN_CHILD
    documents = [check(answer) for answer in answers]
    for file, document in list(zip(files, documents, strict=True))[:5]:
        if document:
            assert "architecture" in text(capsys, str(file.path))
        else:
            with pytest.raises(EdgeLMError, match="cannot be read"):
                show_model(str(file.path), {}, template=False, as_json=False)


def test_a_projector_is_shown_with_its_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(home / "t-Q4_0.gguf")
    assert shown(capsys, model)["projector"] is None
    eyes = write_projector(home / "mmproj-t-f16.gguf")
    document = shown(capsys, model)
    assert document["projector"]["kind"] == "gemma3"
    assert (document["files"], document["bytes"]) == (2, model.stat().st_size + eyes.stat().st_size)
    assert "read by mmproj-t-f16.gguf: gemma3, F16" in " ".join(text(capsys, model).split())
    write_projector(eyes, width=96)
    assert "not read: mmproj-t-f16.gguf is the projector of another model" in " ".join(text(capsys, model).split())
