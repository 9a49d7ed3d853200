"""A mutated GGUF gives a model or a ModelError: no other exception, no gigabytes, no hang."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf.constants import GGUFValueType as V

from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.gguf_parse import TENSOR_TYPES, Array
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.summary import model_summary
from tests.checkpoints.fuzzing import EXTREMES, MUTANTS, TIME_LIMIT, fuzz, put, refusal
from tests.checkpoints.gguf_bytes import Key, RawGGUF, RawTensor, text
from tests.checkpoints.small_models import FAMILIES, key, tensor
from tests.counts import Count

OTHER_KEYS = [
    "llama.attention.key_length",
    "llama.attention.sliding_window",
    "llama.expert_group_count",
    "llama.nextn_predict_layers",
    "llama.rope.scaling.type",
    "general.name",
    "general.file_type",
    "general.type",
    "split.count",
]


class Base:
    """A valid file, and the places of numbers in its header: (offset, width)."""

    def __init__(self, raw: RawGGUF) -> None:
        self.raw = raw
        self.data = raw.to_bytes()
        self.numbers = [(4, 4), (8, 8), (16, 8)]
        for name, (kind, _) in raw.keys.items():
            at = self.data.index(text(name))
            value = at + 8 + len(name)
            self.numbers += [(at, 8), (value, 4), (value + 4, 4), (value + 4, 8)]
            self.numbers += [(value + 8, 8), (value + 16, 8)] if kind == 9 else []
        for described in raw.tensors:
            at = self.data.index(text(described.name))
            dims = at + 8 + len(described.name)
            behind = dims + 4 + 8 * len(described.dims)
            self.numbers += [(at, 8), (dims, 4), (behind, 4), (behind + 4, 8)]
            self.numbers += [(dims + 4 + 8 * i, 8) for i in range(len(described.dims))]
        self.header_len = behind + 12


def flip_bits(data: bytearray, base: Base, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(min(base.header_len, len(data)))] ^= 1 << rng.randrange(8)


def cut(data: bytearray, base: Base, rng: random.Random) -> None:
    del data[rng.randrange(rng.choice([base.header_len, len(data)]) + 1) :]


def lie(data: bytearray, base: Base, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, width = rng.choice(base.numbers)
        value = rng.choice([*EXTREMES, len(data), len(data) - at, rng.getrandbits(8 * width)])
        data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")


def lie_in_a_fraction(data: bytearray, base: Base, rng: random.Random) -> None:
    at, _ = rng.choice(base.numbers)
    data[at : at + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e30]))


def splice(data: bytearray, base: Base, rng: random.Random) -> None:
    start, end = sorted(rng.randrange(base.header_len) for _ in range(2))
    at = rng.randrange(base.header_len)
    data[at : at + rng.choice([0, end - start])] = base.data[start : min(end, start + 200)]


def drop(data: bytearray, base: Base, rng: random.Random) -> None:
    at = rng.randrange(base.header_len)
    del data[at : at + rng.choice([1, 4, 8, 50])]


def scramble(data: bytearray, base: Base, rng: random.Random) -> None:
    at = rng.randrange(base.header_len)
    data[at : at + 16] = rng.randbytes(16)


MUTATIONS: list[Callable[[bytearray, Base, random.Random], None]] = [
    flip_bits,
    cut,
    lie,
    lie,
    lie,
    lie_in_a_fraction,
    splice,
    drop,
    scramble,
]


def some_value(rng: random.Random) -> Key:
    """Return a value that the type of a key allows."""
    kind = rng.choice([V.UINT32, V.INT32, V.UINT64, V.FLOAT32, V.FLOAT64, V.BOOL, V.STRING])
    if rng.random() < 0.2:
        of = rng.choice([V.UINT32, V.FLOAT32, V.BOOL, V.STRING])
        return V.ARRAY, (of, [plain_value(of, rng) for _ in range(rng.choice([0, 1, 2, 3, 24, 100]))])
    return kind, plain_value(kind, rng)


def plain_value(kind: V, rng: random.Random) -> object:
    if kind == V.STRING:
        return rng.choice(["", "llama", "qwen3", "gpt2", "bert", "clip", "x" * 1000, "\0", b"\xff\xfe"])
    if kind in (V.FLOAT32, V.FLOAT64):
        return rng.choice([0.0, 1e-5, -1.0, 1e30, float("nan"), float("inf")])
    bits = {V.UINT32: 32, V.INT32: 31, V.UINT64: 64, V.BOOL: 1}[kind]
    return rng.choice([rng.randrange(9), rng.choice(EXTREMES)]) % 2**bits


def rewrite(base: Base, rng: random.Random) -> bytes:
    """Write the file with other values, types, shapes or names that are well-formed."""
    raw = replace(base.raw, keys=dict(base.raw.keys), tensors=list(base.raw.tensors))
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.7:
            raw.keys[rng.choice([*raw.keys, *OTHER_KEYS])] = some_value(rng)
        else:
            i = rng.randrange(len(raw.tensors))
            old = raw.tensors[i]
            dims = tuple(rng.choice([*old.dims, 1, 32, 64]) for _ in range(rng.choice([len(old.dims), 1, 2, 4])))
            kind = rng.choice([old.type, *(i for i, kind in TENSOR_TYPES.items() if dims[0] % kind.block_len == 0)])
            change = rng.choice([[], [tensor(str(old.name), dims, kind)], [tensor(f"{old.name!s}2", old.dims), old]])
            raw.tensors[i : i + 1] = change
    return raw.to_bytes()


def mutate(base: Base, rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return rewrite(base, rng)
    data = bytearray(base.data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(MUTATIONS)(data, base, rng)
        data += bytes(max(0, base.header_len - len(data))) if rng.random() < 0.5 else b""
        if len(data) < base.header_len:
            break
    return bytes(data)


def read_all(gguf: GGUF) -> None:
    """Read everything that is read on access."""
    for value in gguf.metadata.values():
        if isinstance(value, Array) and len(value):
            assert value[-1] is not None
            assert sum(1 for _ in value) == len(value)
    for name, described in gguf.tensors.items():
        assert len(gguf.tensor_bytes(name)) == gguf.array(name).nbytes == described.nbytes


def outcome(path: Path) -> str:
    """Return the stage that the file reached. Raises any exception other than ModelError."""
    stage = "opening"
    try:
        with open_gguf(path) as gguf:
            read_all(gguf)
            stage = "summary"
            model_summary(gguf)
            stage = "checks"
            check_for_llama(gguf)
            return "accepted"
    except ModelError as error:
        return refusal(stage, error)


@pytest.mark.timeout(TIME_LIMIT)
def test_only_model_errors_come_out_of_mutated_files(tmp_path: Path) -> None:
    names = ["llama", "deepseek2", "lfm2", "deci"]
    split = FAMILIES["llama"].with_keys(split__count=key(3), split__no=key(0))
    bases = [Base(FAMILIES[name].with_keys(general__alignment=key(32), yes=key(True))) for name in names] + [
        Base(split)
    ]
    path = tmp_path / "model.gguf"

    def read(data: bytes) -> str:
        put(path, data)
        return outcome(path)

    stages = ("opening", "summary", "checks", "accepted")
    fuzz(MUTANTS, lambda rng: mutate(rng.choice(bases), rng), read, stages=stages, kinds=20)


def hostile(name: str, size: int) -> RawGGUF:
    """Return a file with the largest accepted amount of one thing."""
    raw = FAMILIES["llama"]
    if name == "tensors":
        return replace(raw, tensors=[*raw.tensors, *(RawTensor(f"t{i}", (1,), 24, b"x") for i in range(size))])
    if name == "keys":
        return raw.with_keys(**{f"k{i}": key("\U0001f600" * 9) for i in range(size)})
    if name == "strings":
        return raw.with_keys(tokenizer__ggml__merges=key([""] * size))
    if name == "tokens":
        embedding = tensor("token_embd.weight", (32, size), 2)
        tokens = key([f"{i}" for i in range(size)])
        return replace(raw, tensors=[embedding, *raw.tensors[1:]]).with_keys(tokenizer__ggml__tokens=tokens)
    if name == "long tokens":
        return raw.with_keys(tokenizer__ggml__tokens=(V.ARRAY, (V.STRING, [b"\xff" * (size // 2)] * 2 + [b"x"] * 22)))
    assert name == "wide text"
    wide = "\U0001f600" + "x" * size
    return raw.with_keys(general__name=key(wide), tokenizer__chat_template=key(wide))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tensors", Count(test=2_000, soak=65_000)),
        ("keys", Count(test=2_000, soak=16_000)),
        ("strings", Count(test=50_000, soak=4_000_000)),
        ("tokens", Count(test=50_000, soak=1_000_000)),
        ("long tokens", 33_000_000),
        ("long tokens", 60_000_000),
        ("wide text", 8_000_000),
        ("wide text", 60_000_000),
    ],
)
@pytest.mark.timeout(TIME_LIMIT)
def test_the_largest_accepted_file_takes_little_memory(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(hostile(name, size).to_bytes())

    def look(path: Path) -> str:
        with open_gguf(path) as gguf:
            stages = []
            for look_at in (model_summary, check_for_llama):
                try:
                    look_at(gguf)
                    stages.append("accepted")
                except ModelError as error:
                    stages.append(refusal(look_at.__name__, error))
            return ", ".join(stages)

    fuzz(1, lambda _: path, look, stages=(), kinds=0)


@pytest.mark.timeout(TIME_LIMIT)
def test_only_model_errors_come_out_of_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    path = tmp_path / "model.gguf"
    for _ in range(MUTANTS // 10):
        head = struct.pack("<4sIQQ", b"GGUF", 3, rng.randrange(4), rng.randrange(4))
        put(path, rng.choice([b"", b"GGUF", head]) + rng.randbytes(rng.randrange(300)))
        outcome(path)
