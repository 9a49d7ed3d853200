"""A conversion that is interrupted, at any point and in any way, leaves no model, and goes on to the same bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edgelm.base.disk import unfinished
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.workers.messages import Result
from edgelm.base.workers.parent import Worker
from edgelm.library.scan import scan
from edgelm.making.conversion import gguf_file
from edgelm.making.conversion.convert import Report, Source, convert_folder
from edgelm.making.conversion.gguf_file import GGUFFile
from edgelm.making.conversion.messages import REPLIES, WORKER, ConvertJob, Written
from edgelm.making.conversion.tensors import Bytes, OutTensor
from tests.counts import Count
from tests.making.conversion.folders import folder_of

KILLS = Count(test=2, soak=20)
WIDTH = Count(test=512, soak=1024)
TIMEOUT_S = 60
LAST_KILL_S = 3.0  # after the start of a conversion


class StoppedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("llama3", tmp_path_factory.mktemp("models") / "folder")


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    """The bytes of an uninterrupted conversion."""
    out = folder.parent / "whole.gguf"
    convert_folder(folder, out)
    return out.read_bytes()


@pytest.fixture
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the state after each tensor, as after each 64 MiB of a large model."""
    monkeypatch.setattr(gguf_file, "STATE_EVERY_BYTES", 0)


def listed(folder: Path) -> list[str]:
    """Return the models that `edgelm list` finds in a folder."""
    return [model.path.name for model in scan(folders=[folder]).models if model.path.is_relative_to(folder)]


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Let the conversion fail while it writes the tensor with a number; return the names of those that it writes."""
    written: list[str] = []
    write = GGUFFile.write

    def stopping(
        self: GGUFFile, writer: Any, tensors: Any, pieces: Callable[[OutTensor], Iterator[Bytes]], p: Any
    ) -> None:
        def watched(tensor: OutTensor) -> Iterator[Bytes]:
            written.append(tensor.name)
            if len(written) == number:
                yield next(pieces(tensor))[:8]
                raise error
            yield from pieces(tensor)

        write(self, writer, tensors, watched, p)

    monkeypatch.setattr(GGUFFile, "write", stopping)
    return written


def test_it_goes_on_at_the_next_tensor(
    folder: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_tensor: None
) -> None:
    out = tmp_path / "model.gguf"
    with monkeypatch.context() as patch:
        first = stop_at(patch, 20, StoppedError())
        with pytest.raises(StoppedError):
            convert_folder(folder, out)
    assert unfinished(out).exists()
    assert not listed(tmp_path)
    second = stop_at(monkeypatch, 0, StoppedError())
    convert_folder(folder, out)
    assert second[0] == first[-1]
    assert out.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert listed(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("change", ["type", "config", "weights", "shorter"])
def test_another_source_or_a_damaged_part_starts_over(
    folder: Path, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_tensor: None
) -> None:
    copy = shutil.copytree(folder, tmp_path / "folder")
    out = tmp_path / "model.gguf"
    with monkeypatch.context() as patch:
        first = stop_at(patch, 20, StoppedError())
        with pytest.raises(StoppedError):
            convert_folder(copy, out)
    if change == "config":
        (copy / "tokenizer_config.json").write_text("{}")
    elif change == "weights":
        weights = copy / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-8:] = bytes(8)
        weights.write_bytes(data)
    elif change == "shorter":
        os.truncate(unfinished(out), 4096)
    to: Any = "F16" if change == "type" else "source"
    with monkeypatch.context() as patch:
        second = stop_at(patch, 0, StoppedError())
        convert_folder(copy, out, to)
    assert second[0] == first[0]
    convert_folder(copy, tmp_path / "again.gguf", to)
    assert out.read_bytes() == (tmp_path / "again.gguf").read_bytes()


def test_a_full_disk_is_said_before_and_while_it_is_written(
    folder: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_tensor: None
) -> None:
    out = tmp_path / "model.gguf"
    with monkeypatch.context() as patch:
        patch.setattr("edgelm.base.disk.free_bytes", lambda _: 1000)
        with pytest.raises(EdgeLMError, match=r"model\.gguf will take .* and .* has 0\.0 MiB free"):
            convert_folder(folder, out)
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        stop_at(patch, 9, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(EdgeLMError, match="is full; free some space; the same command goes on where it stopped"):
            convert_folder(folder, out)
    assert not listed(tmp_path)
    convert_folder(folder, out)
    assert out.read_bytes() == whole


def test_a_limit_of_the_system_is_said_as_well(folder: Path, tmp_path: Path) -> None:
    """The real error of a write, by a limit on the size of files, which the worker inherits."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000));"
        "sys.argv = sys.argv[:1]; import runpy;"
        "runpy.run_module('edgelm.making.conversion.worker', run_name='__main__')"
    )
    with Worker("", replies=REPLIES, command=(sys.executable, "-c", script)) as worker:
        worker.send(ConvertJob(folder=folder, out=tmp_path / "model.gguf", check=False))
        with pytest.raises(EdgeLMError, match=r"cannot take model\.gguf: .* does not allow files so large"):
            list(worker.replies())
    assert not listed(tmp_path)


def test_a_failed_check_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def check(source: Source, part: Path) -> None:
        assert part.stat().st_size > sum(tensor.nbytes for tensor in source.layout.tensors)
        raise ModelError("the logits differ")

    with pytest.raises(ModelError, match="the logits differ"):
        convert_folder(folder, tmp_path / "model.gguf", check=check)
    assert not list(tmp_path.iterdir())


def test_one_file_is_written_by_one_process_at_a_time(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"

    def second(done: int, total: int) -> None:
        with pytest.raises(EdgeLMError, match=r"another edgelm is writing model\.gguf"):
            convert_folder(folder, out)

    convert_folder(folder, out, report=Report(written=second))
    assert listed(tmp_path) == ["model.gguf"]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of some 60 MB, whose conversion takes long enough to be killed anywhere."""
    return folder_of(
        "llama2",
        tmp_path_factory.mktemp("larger") / "folder",
        hidden_size=int(WIDTH),
        intermediate_size=2560,
        head_dim=128,
    )


def test_kills_at_random_points(larger: Path, tmp_path: Path) -> None:
    expected = tmp_path / "expected.gguf"
    convert_folder(larger, expected, "F16")
    digest = hashlib.sha256(expected.read_bytes()).hexdigest()
    expected.unlink()
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    out = tmp_path / "model.gguf"
    job = ConvertJob(folder=larger, out=out, to="F16", check=False)
    for kill in range(KILLS):
        with Worker(WORKER, replies=REPLIES, grace_s=TIMEOUT_S) as worker:
            worker.send(job)
            share = rng.random()
            timer = Timer(rng.uniform(0, LAST_KILL_S) if kill % 2 else TIMEOUT_S, worker.kill)  # at any moment, too
            timer.start()
            for reply in iter(lambda: worker.receive(TIMEOUT_S), None):
                if isinstance(reply, Result):
                    break
                if isinstance(reply, Written) and kill % 2 == 0 and reply.done >= share * reply.total:
                    worker.kill()
            timer.cancel()
            worker.kill()
            worker.exit()
        names = sorted(path.name for path in tmp_path.iterdir())
        print(f"kill {kill + 1} {f'at {share:.0%}' if kill % 2 == 0 else 'by time'}: {', '.join(names) or 'nothing'}")
        assert listed(tmp_path) == ([out.name] if out.exists() else [])
        if out.exists():  # the kill came too late
            assert hashlib.sha256(out.read_bytes()).hexdigest() == digest
            out.unlink()
    with Worker(WORKER, replies=REPLIES) as worker:
        worker.send(job)
        assert isinstance(list(worker.replies())[-1], Result)
    assert hashlib.sha256(out.read_bytes()).hexdigest() == digest
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_wrong_folders_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    def error(name: str, spoil: Callable[[Path], object]) -> str:
        copy = shutil.copytree(folder, tmp_path / name)
        spoil(copy)
        with pytest.raises(EdgeLMError) as caught:
            convert_folder(copy, tmp_path / f"{name}.gguf")
        assert not (tmp_path / f"{name}.gguf").exists()
        return str(caught.value)

    assert "has no config.json" in error("a", lambda f: (f / "config.json").unlink())
    assert "cut short" in error("b", lambda f: os.truncate(f / "model.safetensors", 50_000))
    assert "not support the architecture 'x'" in error(
        "c", lambda f: (f / "config.json").write_text('{"model_type": "x"}')
    )
    assert "tokenizer.json is damaged" in error("d", lambda f: (f / "tokenizer.json").write_text("[]"))
    gptq = '"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},'
    text = (folder / "config.json").read_text()
    quantized = error("e", lambda f: (f / "config.json").write_text(text.replace("{", "{" + gptq, 1)))
    assert "are quantized (GPTQ 4-bit)" in quantized
    more = {"model.layers.0.self_attn.extra.weight": torch.from_numpy(np.zeros((2, 2), np.float32))}

    def add_shard(copy: Path) -> None:
        (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
        save_file(more, copy / "model-00002-of-00002.safetensors")

    assert "layers.0.self_attn.extra.weight cannot be converted" in error("f", add_shard)

    def lose_shard(copy: Path) -> None:
        (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")

    assert "model-00002-of-00002.safetensors is missing" in error("g", lose_shard)
