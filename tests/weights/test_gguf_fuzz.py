"""Whatever is done to a GGUF, the reader gives a model or a ModelError: no other exception, no gigabytes, no hang."""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gguf.constants import GGUFValueType as V

from edgelm.errors import ModelError
from edgelm.weights.checks import check_for_llama
from edgelm.weights.gguf import GGUF, open_gguf
from edgelm.weights.gguf_parse import Array
from edgelm.weights.summary import model_summary
from edgelm.weights.tensor_types import TENSOR_TYPES
from tests.counts import Count
from tests.weights.gguf_bytes import Key, RawGGUF, text
from tests.weights.small_models import FAMILIES, key, tensor

MUTANTS = Count(test=2_000, soak=100_000)
TIME_LIMIT = Count(test=120, soak=3600)  # seconds: a hang, not a measurement
MAX_ALLOCATED = 100_000_000
EXTREMES = [0, 1, 2, 3, 7, 8, 9, 13, 31, 32, 33, 255, 513, 2**15, 2**16, 2**24, 2**27, 2**31 - 1, 2**31, 2**32 - 1]
EXTREMES += [2**32, 2**40, 2**48, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 32, 2**64 - 8, 2**64 - 1]


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
    """A true file, and where its header has numbers: (offset, width)."""

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
    """Return a key's value that its type allows, likely or not."""
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
    """Touch everything that is read on access."""
    for value in gguf.metadata.values():
        if isinstance(value, Array) and len(value):
            assert value[-1] is not None
            assert sum(1 for _ in value) == len(value)
    for name, described in gguf.tensors.items():
        assert len(gguf.tensor_bytes(name)) == described.nbytes


def outcome(path: Path) -> str:
    """Say in a word how far the file got. Raises whatever is no ModelError."""
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
        said = str(error)
        assert said.isprintable()
        assert len(said) < 400
        return f"{stage}: {re.sub(r'.*?: |[0-9][0-9,.]*', '', error.message)[:40]}"


@contextmanager
def watched() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(TIME_LIMIT)
def test_only_model_errors_come_out_of_mutated_files(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = ["llama", "deepseek2", "lfm2", "deci"]
    split = FAMILIES["llama"].with_keys(split__count=key(3), split__no=key(0))
    bases = [Base(FAMILIES[name].with_keys(general__alignment=key(32), yes=key(True))) for name in names] + [
        Base(split)
    ]
    outcomes: Counter[str] = Counter()
    most, slowest = 0, 0.0
    path = tmp_path / "model.gguf"
    with watched():
        for i in range(MUTANTS):
            data = mutate(rng.choice(bases), rng)
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            start = time.perf_counter()
            try:
                outcomes[outcome(path)] += 1
            except BaseException:
                print(f"mutant {i} of seed {seed}: {data!r}")
                raise
            slowest = max(slowest, time.perf_counter() - start)
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
            assert most < MAX_ALLOCATED, f"mutant {i} of seed {seed}"
    stages = Counter(dict.fromkeys(("opening", "summary", "checks", "accepted"), 0))
    for what, count in outcomes.items():
        stages[what.partition(":")[0]] += count
    print(
        f"{MUTANTS:,} mutants: {dict(stages)}; {len(outcomes)} kinds; {most:,} bytes at most; slowest {slowest:.3f} s"
    )
    for what, count in outcomes.most_common(40):
        print(f"{count:7,}  {what}")
    assert min(stages.values()) > 0, "the mutations reach only a part of the code"
    assert len(outcomes) > 20


@pytest.mark.timeout(TIME_LIMIT)
def test_only_model_errors_come_out_of_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    path = tmp_path / "model.gguf"
    for _ in range(MUTANTS // 10):
        head = struct.pack("<4sIQQ", b"GGUF", 3, rng.randrange(4), rng.randrange(4))
        path.write_bytes(rng.choice([b"", b"GGUF", head]) + rng.randbytes(rng.randrange(300)))
        outcome(path)
