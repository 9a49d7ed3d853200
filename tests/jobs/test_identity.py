"""The identity of a model by its content: the same for a copy, another for other weights."""

from __future__ import annotations

import os
from pathlib import Path

from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.jobs.reader import content_identity
from tests.checkpoints.safetensors_bytes import folder_files, write_folder
from tests.tiny import write_tiny


def identity(path: Path) -> str:
    if path.is_dir():
        with open_safetensors(path) as folder:
            return content_identity(folder)
    with open_gguf(path) as gguf:
        return content_identity(gguf)


def test_a_copy_has_the_same_identity_at_any_time_and_place(tmp_path: Path) -> None:
    one = write_tiny(tmp_path / "one.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(one.read_bytes())
    os.utime(other, (0, 0))
    assert identity(one) == identity(other)


def test_other_weights_tokens_or_types_have_another(tmp_path: Path) -> None:
    options = ({}, {"seed": 1}, {"quant": "f16"}, {"context": 99}, {"control": ("<x>",)})
    paths = [write_tiny(tmp_path / f"{i}.gguf", **option) for i, option in enumerate(options)]
    assert len({identity(path) for path in paths}) == len(options)


def test_each_tensor_counts(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    before = identity(path)
    data = path.read_bytes()
    with open_gguf(path) as gguf:
        middles = [tensor.offset + tensor.nbytes // 2 for tensor in gguf.tensors.values()]
    for middle in middles:
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        assert identity(path) != before


def test_the_configuration_of_a_folder_counts(tmp_path: Path) -> None:
    files = folder_files()
    one, same = (write_folder(tmp_path / name, files) for name in ("one", "same"))
    assert identity(one) == identity(same)
    (same / "config.json").write_bytes(files["config.json"].replace(b"{", b'{"rope_theta": 5.0, ', 1))
    assert identity(one) != identity(same)
