"""Error messages for files that are not GGUF, are cut short, or are damaged."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGUFValueType as V

from edgelm.base.errors import ModelError
from edgelm.checkpoints import gguf_parse
from edgelm.checkpoints.gguf import open_gguf
from tests.checkpoints.gguf_bytes import Key, RawGGUF, RawTensor, raw_key, text

F32 = RawTensor("blk.3.ffn_up.weight", (4, 2), 0, bytes(32))
KEYS: dict[str, Key] = {"general.architecture": (V.STRING, "llama"), "n": (V.UINT32, 7)}
GOOD = RawGGUF(KEYS, [F32, replace(F32, name="b")])
HUGE = 2**64 - 1
SAFETENSORS = struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}' + bytes(20)


def message(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    return str(caught.value)


def refused(tmp_path: Path, data: bytes, name: str = "model.gguf") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    line = message(path)
    assert line.startswith("model.gguf")
    assert str(tmp_path) not in line
    assert line.isprintable()
    assert len(line) < 300
    return line


def with_tensor(**changes: Any) -> bytes:
    return RawGGUF(KEYS, [replace(F32, **changes)]).to_bytes()


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD.to_bytes())
    with open_gguf(path) as gguf:
        assert list(gguf.tensors) == ["blk.3.ffn_up.weight", "b"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty; download it again (edgelm pull --verify MODEL)"),
        (b"GG", "is cut short: it has 2 bytes"),
        (GOOD.to_bytes()[:23], "is cut short: it has 23 bytes"),
        (b"PK\x03\x04" + bytes(30), "is not a GGUF file: it is a zip archive"),
        (SAFETENSORS, "it is a safetensors file"),
        (b"\n<!DOCTYPE html><html>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "it is a git-lfs pointer"),
        (b'{"error": "no such model"}', "it is JSON text"),
        (bytes(4096), "it begins with zeros, so the download did not finish"),
        (b"tjgg" + bytes(40), "a GGML file from before GGUF"),
        (b"\x1f\x8b\x08\x00aaaa", "compressed with gzip"),
        (b"RIFF\x10\x00\x00\x00AVI LIST", "it begins with 52 49 46 46; name or download a .gguf file"),
        (replace(GOOD, version=1).to_bytes(), "is GGUF version 1, which is too old; convert it or download a newer"),
        (replace(GOOD, version=3 << 24).to_bytes(), "is a big-endian GGUF"),
        (replace(GOOD, version=4).to_bytes(), "is GGUF version 4, newer than edgelm supports; update edgelm"),
        (replace(GOOD, version=12345).to_bytes(), "is damaged: its version is 12,345"),
        (replace(GOOD, version=0).to_bytes(), "is damaged: its version is 0"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_files_that_are_not_gguf_are_described(tmp_path: Path, data: bytes, says: str) -> None:
    assert says in refused(tmp_path, data)


def test_a_file_that_is_cut_short_says_where(tmp_path: Path) -> None:
    data = GOOD.to_bytes()
    line = refused(tmp_path, data[:-1])
    assert line == (
        f"model.gguf is cut short: tensor b ends at byte {len(data):,} of {len(data) - 1:,}"
        "; download it again (edgelm pull --verify MODEL)"
    )
    for length in range(24, data.index(bytes(32), 24)):
        assert "cut short" in refused(tmp_path, data[:length]) or "claims" in refused(tmp_path, data[:length])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (replace(GOOD, num_tensors=HUGE).to_bytes(), "its header claims 18,446,744,073,709,551,615 tensors"),
        (replace(GOOD, num_keys=HUGE).to_bytes(), "its header claims 18,446,744,073,709,551,615 keys"),
        (replace(GOOD, num_tensors=30).to_bytes(), "its header claims 30 tensors"),
        (replace(GOOD, num_keys=50).to_bytes(), "its header claims 50 keys"),
        (replace(GOOD, num_keys=3).to_bytes(), "model.gguf"),
        (replace(GOOD, num_keys=1).to_bytes(), "model.gguf"),
        (RawGGUF(KEYS, num_keys=3, extra_keys=raw_key("n", V.UINT32, 1)).to_bytes(), "the key n is there twice"),
        (
            RawGGUF(KEYS, num_keys=3, extra_keys=text("z") + struct.pack("<I", 13) + bytes(9)).to_bytes(),
            "z has type 13",
        ),
        (
            RawGGUF(KEYS, num_keys=3, extra_keys=raw_key(b"\xff", V.UINT32, 1)).to_bytes(),
            "key 3 of 3 is not printable text",
        ),
        (
            RawGGUF(KEYS, num_keys=3, extra_keys=raw_key("a\x1b[2J", V.UINT32, 1)).to_bytes(),
            "key 3 of 3 is not printable text",
        ),
        (RawGGUF(KEYS, num_keys=3, extra_keys=raw_key("", V.UINT32, 1)).to_bytes(), "key 3 of 3 is 0 bytes long"),
        (RawGGUF({"a" * 257: (V.UINT8, 1)}).to_bytes(), "key 1 of 1 is 257 bytes long"),
        (RawGGUF(num_keys=1, extra_keys=struct.pack("<QQ", HUGE, 0)).to_bytes(), "cut short or damaged: key 1 of 1"),
        (
            RawGGUF(num_keys=1, extra_keys=text("s") + struct.pack("<IQ", 8, 2**62) + bytes(9)).to_bytes(),
            "the value of s goes past the end of the file at byte",
        ),
        (
            RawGGUF(num_keys=1, extra_keys=text("a") + struct.pack("<IIQ", 9, 5, 2**62) + bytes(9)).to_bytes(),
            "the value of a goes past the end",
        ),
        (
            RawGGUF(num_keys=1, extra_keys=text("a") + struct.pack("<IIQ", 9, 8, 2**62) + bytes(9)).to_bytes(),
            "the value of a goes past the end",
        ),
        (
            RawGGUF(num_keys=1, extra_keys=text("a") + struct.pack("<IIQQ", 9, 8, 1, HUGE) + bytes(9)).to_bytes(),
            "the value of a goes past the end",
        ),
        (
            RawGGUF(num_keys=1, extra_keys=text("a") + struct.pack("<IIQQQ", 9, 8, 2, HUGE, 1) + bytes(9)).to_bytes(),
            "the value of a goes past the end",
        ),
        (
            RawGGUF(num_keys=1, extra_keys=text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(40)).to_bytes(),
            "the value of a is an array of arrays",
        ),
        (RawGGUF(KEYS).with_keys(general__alignment=(V.UINT32, 24)).to_bytes(), "general.alignment is 24, not a power"),
        (RawGGUF(KEYS).with_keys(general__alignment=(V.UINT32, 0)).to_bytes(), "general.alignment is 0, not a power"),
        (
            RawGGUF(KEYS).with_keys(general__alignment=(V.UINT32, 2**31)).to_bytes(),
            "not a power of two from 8 to 1,048,576",
        ),
        (RawGGUF(KEYS).with_keys(general__alignment=(V.STRING, "x")).to_bytes(), "general.alignment is x"),
        (with_tensor(dims=(1,) * 5), "has 5 dimensions, but the limit is 4"),
        (with_tensor(dims=(4, 0)), "has a dimension of 0"),
        (with_tensor(dims=(2**63, 2**63, 2**63, 2**63)), "ends far beyond any file"),
        (with_tensor(dims=(2**32, 2**32)), "ends far beyond any file"),
        (with_tensor(dims=(40, 2)), "model.gguf is cut short: tensor blk.3.ffn_up.weight ends at byte 480 of 192"),
        (with_tensor(type=77), "tensor blk.3.ffn_up.weight has the unsupported type 77; update edgelm"),
        (with_tensor(type=31), "has the unsupported type Q4_0_4_4; llama.cpp removed this type: download a Q4_0 file"),
        (with_tensor(type=2), "has rows of 4, but Q4_0 needs multiples of 32"),
        (with_tensor(offset=4), "starts at 4, not a multiple of 32"),
        (with_tensor(offset=2**64 - 32), "ends far beyond any file"),
        (with_tensor(name=b"\xff\xfe"), "the name of tensor 1 is not printable text"),
        (with_tensor(name="x" * 300), "the name of tensor 1 is 300 bytes long"),
        (RawGGUF(KEYS, [F32, F32]).to_bytes(), "tensor blk.3.ffn_up.weight is there twice"),
        (RawGGUF(KEYS, [F32, replace(F32, name="b", offset=0)]).to_bytes(), "tensor b overlaps blk.3.ffn_up.weight"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_a_damaged_header_is_described(tmp_path: Path, data: bytes, says: str) -> None:
    assert says in refused(tmp_path, data)


def test_more_strings_than_can_be_walked_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_parse, "MAX_STRINGS", 5)
    strings: dict[str, Key] = {"a": (V.ARRAY, (V.STRING, ["x"] * 3)), "b": (V.ARRAY, (V.STRING, ["y"] * 3))}
    assert "the value of b has 3 strings" in refused(tmp_path, RawGGUF(strings).to_bytes())


def test_a_string_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_parse, "MAX_STRING_BYTES", 5)
    assert "the value of a is 6 bytes long" in refused(tmp_path, RawGGUF({"a": (V.STRING, "abcdef")}).to_bytes())


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    assert message(tmp_path / "none.gguf") == f"there is no file {tmp_path / 'none.gguf'}"
    assert message(tmp_path) == f"{tmp_path.name} is a folder; name a .gguf file"
    assert "cannot be opened" in message(tmp_path / ("x" * 5000))
    assert "cannot be opened" in message(tmp_path / "a\0b")
    (tmp_path / "file").touch()
    assert "file/model.gguf cannot be opened" in message(tmp_path / "file" / "model.gguf") or "model.gguf cannot be"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert message(pipe) == "pipe is not a regular file; name a .gguf file"


def test_a_file_without_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD.to_bytes())

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # the tests may run as root, whom no mode stops

    monkeypatch.setattr(Path, "open", denied)
    assert message(path) == "model.gguf may not be read; change its permissions"


def test_a_strange_file_name_stays_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\nb.gguf"
    path.write_bytes(b"nothing")
    assert message(path).startswith("a?[31m?b.gguf is not a GGUF file")


def split(tmp_path: Path, **second: Any) -> Path:
    """Write three parts; `second` changes the second."""
    for i in range(3):
        keys: dict[str, Key] = {
            "split.no": (V.UINT16, i),
            "split.count": (V.UINT16, 3),
            "split.tensors.count": (V.INT32, 3),
        }
        raw = RawGGUF(keys if i else {**KEYS, **keys}, [replace(F32, name=f"t{i}")])
        if i == 1 and second:
            raw = replace(raw, **second)
        (tmp_path / f"model-{i + 1:05d}-of-00003.gguf").write_bytes(raw.to_bytes())
    return tmp_path / "model-00001-of-00003.gguf"


def test_a_split_model_opens(tmp_path: Path) -> None:
    with open_gguf(split(tmp_path)) as gguf:
        assert list(gguf.tensors) == ["t0", "t1", "t2"]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = split(tmp_path)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    assert message(path) == (
        "model-00002-of-00003.gguf is missing, and model-00001-of-00003.gguf is part 1 of 3; "
        "download all parts into one folder"
    )


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path).rename(tmp_path / "model.gguf")
    assert message(path).startswith("model.gguf is part 1 of 3, but is not named so")
    swapped = (tmp_path / "model-00003-of-00003.gguf").rename(tmp_path / "model-00001-of-00003.gguf")
    assert message(swapped).startswith("model-00001-of-00003.gguf is part 3 of 3, but is not named so")


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"keys": {}}, "model-00002-of-00003.gguf does not belong to model-00001-of-00003.gguf"),
        ({"tensors": [replace(F32, name="t0")]}, "model-00002-of-00003.gguf: tensor t0 is in another part too"),
        ({"tensors": []}, "hold 2 tensors, but should hold 3"),
        ({"version": 1}, "model-00002-of-00003.gguf is GGUF version 1"),
        ({"tensors": [replace(F32, dims=(400,))]}, "model-00002-of-00003.gguf is cut short"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, second: dict[str, Any], says: str) -> None:
    assert says in message(split(tmp_path, **second))


@pytest.mark.parametrize("count", [(V.STRING, "3"), (V.INT32, -1), (V.UINT32, 2**31)])
def test_a_count_of_parts_that_cannot_be_is_refused(tmp_path: Path, count: tuple[V, object]) -> None:
    assert re.search(
        "is not a number of parts|not named so", refused(tmp_path, GOOD.with_keys(split__count=count).to_bytes())
    )
