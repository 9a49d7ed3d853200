"""A mutated safetensors file or folder gives a model or a ModelError.

There is no other exception, no gigabytes, no hang. The format's own library reads accepted files the same.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

from edgelm.base.errors import ModelError
from edgelm.checkpoints.folder import folder_summary
from edgelm.checkpoints.safetensors import Safetensors, open_safetensors
from edgelm.checkpoints.safetensors_parse import DTYPES
from tests.checkpoints.fuzzing import EXTREMES, MUTANTS, TIME_LIMIT, fuzz, put, refusal
from tests.checkpoints.safetensors_bytes import CONFIG, SHAPES, entries, file_of, folder_files, shard_name, sharded
from tests.counts import Count

INDEX = "model.safetensors.index.json"
Files = dict[str, bytes]
SOME: list[Any] = [None, True, False, "", "x", "F32", [], {}, [[]], 0.5, -1, 1e999, float("nan"), "\ud800", "a" * 600]
MORE_KEYS = ["layer_types", "sliding_window", "kv_lora_rank", "text_config", "quantization_config", "head_dim"]
MORE_KEYS += ["num_kv_shared_layers", "full_attention_interval", "use_sliding_window", "multi_query", "v_head_dim"]
MORE_VALUES: list[Any] = [["full_attention", "conv"], {"quant_method": "awq", "bits": 4}, {"config_groups": {"g": 1}}]
MORE_VALUES += [{"num_hidden_layers": 3}, {"quant_method": "compressed-tensors", "config_groups": {}}, [1, 2], [2, "x"]]


def some_number(rng: random.Random) -> int:
    return rng.choice([*EXTREMES, rng.randrange(100), -rng.randrange(100), 10**400])


def flip_bits(text: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)


def cut(text: bytearray, rng: random.Random) -> None:
    del text[rng.randrange(len(text)) :]


def splice(text: bytearray, rng: random.Random) -> None:
    start, end = sorted(rng.randrange(len(text)) for _ in range(2))
    at = rng.randrange(len(text))
    text[at : at + rng.choice([0, end - start])] = text[start : min(end, start + 200)]


def drop(text: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(text))
    del text[at : at + rng.choice([1, 1, 4, 50])]


def write_signs(text: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(text))
    signs = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"0", b"-", b"1e9", b"null", b"\xff", b"\0"]
    text[at : at + rng.randrange(2)] = rng.choice(signs) * rng.choice([1, 1, 1, 3, 2000])


def write_a_number(text: bytearray, rng: random.Random) -> None:
    places = [i for i in range(len(text)) if chr(text[i]).isdecimal()]
    if places:
        at = rng.choice(places)
        text[at : at + 1] = str(some_number(rng)).encode()


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [flip_bits, cut, splice, drop, write_signs]
MUTATIONS += [write_a_number, write_a_number]


def broken_text(text: bytes, rng: random.Random) -> bytes:
    """Change the bytes of a JSON text, which is then rarely valid."""
    data = bytearray(text)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if data:
            rng.choice(MUTATIONS)(data, rng)
    return bytes(data)


def other_values(value: Any, rng: random.Random) -> Any:
    """Change something in a JSON value, which stays valid."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value])
        change = rng.random()
        if change < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if change < 0.2:
            return value | {rng.choice([*value, "new", "", "x\n"]): value[key]}
        return value | {key: other_values(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], *rng.choice([[], [other_values(value[at], rng)]]), *value[at + 1 :]]
    if isinstance(value, str) and rng.random() < 0.6:
        return rng.choice([*DTYPES, "../" + value, shard_name(1, 2), value[:-1], value + "x"])
    return rng.choice([some_number(rng), rng.choice(SOME)])


def broken_file(data: bytes, rng: random.Random) -> bytes:
    """Change a safetensors file: its header, the length of it, or the end of the data."""
    (length,) = struct.unpack_from("<Q", data)
    header, tail = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.4:
        header = json.dumps(other_values(json.loads(header), rng)).encode()
    elif kind < 0.8:
        header = broken_text(header, rng)
    elif kind < 0.9:
        tail = tail[: rng.randrange(len(tail) + 1)] + rng.choice([b"", b"x", bytes(100)])
    else:
        return data[: rng.randrange(len(data) + 1)]
    claimed = len(header) if rng.random() < 0.9 else rng.choice([*EXTREMES, len(data), len(data) - 8]) % 2**64
    return struct.pack("<Q", claimed) + header + tail


def other_config(text: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return broken_text(text, rng)
    config = json.loads(text)
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.5:
            config = other_values(config, rng)
        elif isinstance(config, dict):
            value = rng.choice([*MORE_VALUES, *SOME, some_number(rng), rng.randrange(5)])
            config = config | {rng.choice([*MORE_KEYS, *CONFIG]): value}
    return json.dumps(config).encode()


def mutate(base: Files, rng: random.Random) -> Files:
    """Change one file of a folder, rarely two."""
    files = dict(base)
    for name in rng.sample(sorted(files), rng.choice([1, 1, 1, 2])):
        if rng.random() < 0.03:
            del files[name]
        elif name.endswith(".safetensors"):
            files[name] = broken_file(files[name], rng)
        elif name == "config.json":
            files[name] = other_config(files[name], rng)
        elif rng.random() < 0.5:
            files[name] = broken_text(files[name], rng)
        else:
            files[name] = json.dumps(other_values(json.loads(files[name]), rng)).encode()
    return files


def read_all(model: Safetensors) -> None:
    """Read everything, and compare it with the format's own library."""
    theirs = {path: dict(safetensors.deserialize(path.read_bytes())) for path in model.paths}
    assert sum(map(len, theirs.values())) == len(model.tensors)
    for name, tensor in model.tensors.items():
        each = theirs[tensor.path][name]
        assert [tensor.dtype.name, *tensor.shape] == [each["dtype"], *each["shape"]]
        assert bytes(model.tensor_bytes(name)) == bytes(each["data"])
        assert model.array(name).nbytes in (tensor.nbytes, tensor.num_elements)


def outcome(path: Path) -> str:
    """Return the stage that the folder reached. Raises any exception other than ModelError."""
    stage = "opening"
    try:
        with open_safetensors(path) as model:
            read_all(model)
            stage = "summary"
            summary = folder_summary(model)
            assert len(summary.kv_heads) == len(summary.key_lens) == summary.layers
            assert summary.kv_bytes_per_token >= 0
            return "accepted"
    except ModelError as error:
        return refusal(stage, error)


def as_small_file(data: bytes) -> Files:
    return folder_files() | {"model.safetensors": data}


BASES: list[Files] = [
    folder_files(tokenizer_config__json=b'{"chat_template": "{{ messages }}", "added": {"1": {"x": [1, 2]}}}'),
    as_small_file(file_of({"__metadata__": {"format": "pt", "k": '"{}'}} | entries(SHAPES, "F32"))),
    as_small_file(file_of(entries({"a": (0, 4), "b": (2,), "c": (2, 2, 2), "d": (8,)}, "F4"), None)),
    sharded(SHAPES, 3) | {"config.json": json.dumps(CONFIG).encode()},
    sharded(SHAPES, 2, "F8_E4M3") | {"config.json": json.dumps(CONFIG).encode()},
]


@pytest.mark.timeout(TIME_LIMIT)
def test_only_model_errors_come_out_of_mutated_folders(tmp_path: Path) -> None:
    def read(files: Files) -> str:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        return outcome(tmp_path)

    stages = ("opening", "summary", "accepted")
    fuzz(MUTANTS, lambda rng: mutate(rng.choice(BASES), rng), read, stages=stages, kinds=60)


@pytest.mark.timeout(TIME_LIMIT)
def test_only_model_errors_come_out_of_random_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def mutant(rng: random.Random) -> bytes:
        signs = bytes(rng.choice(b'{}[]",:0123456789 \\aF') for _ in range(rng.randrange(60)))
        head = rng.choice([b"", struct.pack("<Q", rng.randrange(80)), struct.pack("<Q", len(signs) + 1) + b"{"])
        return head + rng.choice([signs, rng.randbytes(60)])

    def read(data: bytes) -> str:
        put(path, data)
        return outcome(path)

    fuzz(MUTANTS // 10, mutant, read, stages=("opening",), kinds=3)


def hostile(name: str, size: int) -> Files:
    """Return a folder in which one file has the largest allowed size, and takes the most memory for it."""
    numbers = b'{"":0}'
    if name == "tensors":
        one = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        return {"model.safetensors": file_of(b"{" + b",".join(one % i for i in range(size)) + b"}", 0)}
    if name == "metadata":
        pairs = b",".join(b'"%d":"\\ud83d\\ude00"' % i for i in range(size))
        return {"model.safetensors": file_of(b'{"__metadata__":{' + pairs + b"}}", 0)}
    if name == "blanks":
        return {"model.safetensors": file_of(b"{" + b" " * size, 0)}
    if name == "index":
        pairs = b",".join(b'"%d":"model.safetensors"' % i for i in range(size))
        return folder_files() | {INDEX: b'{"weight_map":{' + pairs + b"}}"} | {"model.safetensors": b""}
    text = {
        "objects": b'{"a":[' + b",".join([numbers] * (size // 7)) + b"]}",
        "wide": b'{"a":"' + "\U0001f600".encode() + b"x" * size + b'"}',
        "lists": b'{"a":[' + b"[]," * (size // 3) + b"[]]}",
        "texts": b'{"a":[' + b",".join(b'"%05d"' % (i % 100_000) for i in range(size // 8)) + b"]}",
    }[name]
    return folder_files() | {"config.json": text}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tensors", Count(test=10_000, soak=150_000)),
        ("tensors", Count(test=10_000, soak=160_000)),
        ("metadata", 16_000),
        ("metadata", 150_000),
        ("blanks", Count(test=9_000_000, soak=90_000_000)),
        ("index", Count(test=20_000, soak=150_000)),
        ("objects", 900_000),
        ("objects", 6_000_000),
        ("wide", 6_000_000),
        ("lists", 390_000),
        ("texts", 2_000_000),
    ],
)
@pytest.mark.timeout(TIME_LIMIT)
def test_the_largest_accepted_file_takes_little_memory(tmp_path: Path, name: str, size: int) -> None:
    files = hostile(name, size)
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    path = tmp_path / INDEX if name == "index" else tmp_path
    fuzz(1, lambda _: path, outcome_without_reading, stages=(), kinds=0)


def outcome_without_reading(path: Path) -> str:
    """Like `outcome`, without the library, whose copies are larger than ours."""
    stage = "opening"
    try:
        with open_safetensors(path) as model:
            stage = "summary"
            folder_summary(model)
            return "accepted"
    except ModelError as error:
        return refusal(stage, error)
