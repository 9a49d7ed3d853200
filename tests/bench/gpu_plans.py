"""Plans of popular models on GPUs that are not there: what edgelm would do, and why, for each free memory.

    python -m tests.bench.gpu_plans [NAME …]

The files have the header of a real one (sizes of its layers, Q4_K_M's mix of types) and no weights: a hole of the file
system. llama.cpp's device and CUDA are fakes with so much free memory; the choice and the plans are edgelm's own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Quant

from edgelm.backends import build
from edgelm.backends.llama import devices
from edgelm.backends.llama.offload import OffloadedMemory
from edgelm.backends.llama.placement import Device, Wish
from edgelm.backends.model import OpenedModel
from edgelm.backends.plan import MachineMemory, plan
from edgelm.base.config import Settings
from edgelm.base.machine.gpu import CudaState, StandingGpu
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import model_facts

GIB = 2**30
FREE_GIB = 6.5, 7.2, 10.5, 11.3, 22, 78
CONTEXT_BYTES = 300 * 2**20  # of CUDA, assumed
MAIN_MEMORY = MachineMemory(free_bytes=24 * GIB, cores=8)
CARD = "a GPU"
WIDTH = 88


class Matrix(NamedTuple):
    """A matrix of a layer: its name, rows and columns, and how many experts have one."""

    name: str
    rows: int
    columns: int
    experts: int = 0


class Model(NamedTuple):
    """The header of a model: llama.cpp's keys, and the matrices of each layer."""

    name: str
    architecture: str
    keys: dict[str, Any]
    layers: Sequence[Sequence[Matrix]]
    width: int
    vocab: int
    tied: bool = False


def attention(
    width: int, heads: int, kv_heads: int, head_len: int, *, gated: bool = False, values: bool = True
) -> list[Matrix]:
    matrices = [
        Matrix("attn_q", heads * head_len * (1 + gated), width),
        Matrix("attn_k", kv_heads * head_len, width),
        Matrix("attn_output", width, heads * head_len),
    ]
    return [*matrices, Matrix("attn_v", kv_heads * head_len, width)] if values else matrices


def delta(width: int, key_heads: int, value_heads: int) -> list[Matrix]:
    inner = 128 * value_heads
    return [
        Matrix("attn_qkv", 2 * 128 * key_heads + inner, width),
        Matrix("attn_gate", inner, width),
        Matrix("ssm_out", width, inner),
    ]


def mamba(width: int, inner: int, state: int, groups: int, heads: int) -> list[Matrix]:
    return [Matrix("ssm_in", 2 * inner + 2 * groups * state + heads, width), Matrix("ssm_out", width, inner)]


def dense(width: int, ffn: int, suffix: str = "") -> list[Matrix]:
    return [
        Matrix(f"ffn_gate{suffix}", ffn, width), Matrix(f"ffn_up{suffix}", ffn, width),
        Matrix(f"ffn_down{suffix}", width, ffn),
    ]  # fmt: skip


def mixture(width: int, ffn: int, experts: int, *, gated: bool = True) -> list[Matrix]:
    gate = [Matrix("ffn_gate_exps", ffn, width, experts)] if gated else []
    return [*gate, Matrix("ffn_up_exps", ffn, width, experts), Matrix("ffn_down_exps", width, ffn, experts)]


def qwen35(
    name: str, layers: int, width: int, heads: int, kv_heads: int, value_heads: int, ffn: int, *, experts: int = 0,
    tied: bool = False,
) -> Model:  # fmt: skip
    feed = [*mixture(width, ffn, experts), *dense(width, ffn, "_shexp")] if experts else dense(width, ffn)
    mixers = (delta(width, 16, value_heads), attention(width, heads, kv_heads, 256, gated=True))
    keys = {
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": 256,
        "attention.value_length": 256, "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 128,
        "ssm.group_count": 16, "ssm.time_step_rank": value_heads, "ssm.inner_size": 128 * value_heads,
        "context_length": 262_144,
    }  # fmt: skip
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": 8}
    built = [[*mixers[(i + 1) % 4 == 0], *feed] for i in range(layers)]
    return Model(name, "qwen35moe" if experts else "qwen35", keys, built, width, 248_320, tied)


def gemma4(
    name: str, layers: int, width: int, heads: int, kv_heads: tuple[int, int], ffn: int, experts: int = 0
) -> Model:
    whole = [(i + 1) % 6 == 0 for i in range(layers)]
    keys = {
        "attention.head_count": heads, "attention.head_count_kv": [kv_heads[is_whole] for is_whole in whole],
        "attention.key_length": 512, "attention.value_length": 512, "attention.key_length_swa": 256,
        "attention.value_length_swa": 256, "attention.sliding_window": 1024,
        "attention.sliding_window_pattern": [not is_whole for is_whole in whole], "context_length": 262_144,
    }  # fmt: skip
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": 8}
    feed = [*dense(width, ffn), *(mixture(width, 704, experts) if experts else [])]
    mixers = (attention(width, heads, kv_heads[0], 256), attention(width, heads, kv_heads[1], 512, values=False))
    return Model(name, "gemma4", keys, [[*mixers[is_whole], *feed] for is_whole in whole], width, 262_144, tied=True)


def ministral3() -> Model:
    keys = {
        "attention.head_count": 32, "attention.head_count_kv": 8, "attention.key_length": 128,
        "attention.value_length": 128, "context_length": 262_144,
    }  # fmt: skip
    layer = [*attention(4096, 32, 8, 128), *dense(4096, 14_336)]
    return Model("ministral3:8b", "mistral3", keys, [layer] * 34, 4096, 131_072)


def granite4() -> Model:
    whole = [i % 10 == 5 for i in range(40)]
    keys = {
        "attention.head_count": 12, "attention.head_count_kv": [4 * is_whole for is_whole in whole],
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1, "ssm.time_step_rank": 48,
        "ssm.inner_size": 3072, "expert_count": 64, "expert_used_count": 6, "context_length": 131_072,
    }  # fmt: skip
    feed = [*mixture(1536, 512, 64), *dense(1536, 1024, "_shexp")]
    mixers = (mamba(1536, 3072, 128, 1, 48), attention(1536, 12, 4, 128))
    layers = [[*mixers[is_whole], *feed] for is_whole in whole]
    return Model("granite4:h-tiny", "granitehybrid", keys, layers, 1536, 100_352, tied=True)


def lfm2() -> Model:
    whole = [i in (2, 6, 10, 14, 18, 21) for i in range(24)]
    keys = {
        "attention.head_count": 32, "attention.head_count_kv": [8 * is_whole for is_whole in whole],
        "shortconv.l_cache": 3, "expert_count": 32, "expert_used_count": 4, "context_length": 32_768,
    }  # fmt: skip
    convolution = [Matrix("shortconv.in_proj", 6144, 2048), Matrix("shortconv.out_proj", 2048, 2048)]
    mixers = (convolution, attention(2048, 32, 8, 64))
    feeds = [dense(2048, 7168) if i < 2 else mixture(2048, 1792, 32) for i in range(24)]
    layers = [[*mixers[is_whole], *feed] for is_whole, feed in zip(whole, feeds, strict=True)]
    return Model("lfm2:8b-a1b", "lfm2moe", keys, layers, 2048, 65_536, tied=True)


def nemotron3() -> Model:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    kinds = {
        "M": mamba(2688, 4096, 128, 8, 64),
        "E": [*mixture(2688, 1856, 128, gated=False), *dense(2688, 3712, "_shexp")[1:]],
        "*": attention(2688, 32, 2, 128),
    }
    keys = {
        "attention.head_count": [32 * (kind == "*") for kind in pattern],
        "attention.head_count_kv": [2 * (kind == "*") for kind in pattern],
        "attention.key_length": 128, "attention.value_length": 128, "ssm.conv_kernel": 4, "ssm.state_size": 128,
        "ssm.group_count": 8, "ssm.time_step_rank": 64, "ssm.inner_size": 4096, "expert_count": 128,
        "feed_forward_length": [1856 * (kind == "E") for kind in pattern], "expert_used_count": 6,
        "context_length": 1_048_576,
    }  # fmt: skip
    return Model("nemotron3:nano", "nemotron_h_moe", keys, [kinds[kind] for kind in pattern], 2688, 131_072)


def qwen3(name: str, layers: int, width: int, heads: int, ffn: int) -> Model:
    keys = {
        "attention.head_count": heads, "attention.head_count_kv": 8, "attention.key_length": 128,
        "attention.value_length": 128, "context_length": 40_960,
    }  # fmt: skip
    layer = [*attention(width, heads, 8, 128), *dense(width, ffn)]
    return Model(name, "qwen3", keys, [layer] * layers, width, 151_936)


QWEN3_8B = qwen3("qwen3:8b", 36, 4096, 32, 12_288)
QWEN3_14B = qwen3("qwen3:14b", 40, 5120, 40, 17_408)

MODELS = (
    qwen35("qwen3.6:35b-a3b", 40, 2048, 16, 2, 32, 512, experts=256),
    qwen35("qwen3.6:27b", 64, 5120, 24, 4, 48, 17_408),
    qwen35("qwen3.5:9b", 32, 4096, 16, 4, 32, 12_288),
    qwen35("qwen3.5:4b", 32, 2560, 16, 4, 32, 9216, tied=True),
    gemma4("gemma4:26b-a4b", 30, 2816, 16, (8, 2), 2112, experts=128),
    gemma4("gemma4:31b", 60, 5376, 32, (16, 4), 21_504),
    ministral3(),
    granite4(),
    lfm2(),
    nemotron3(),
)


def write_header(path: Path, model: Model) -> None:
    """Write a file with the model's header, as long as the whole model."""
    writer = GGUFWriter(path, model.architecture)
    writer.add_name(model.name)
    writer.add_block_count(len(model.layers))
    writer.add_embedding_length(model.width)
    writer.add_vocab_size(model.vocab)
    for key, value in model.keys.items():
        name = f"{model.architecture}.{key}"
        writer.add_array(name, value) if isinstance(value, list) else writer.add_uint32(name, value)
    nbytes = 0
    for name, quant, *shape in tensors(model):
        block, size = GGML_QUANT_SIZES[quant]
        nbytes += (count := int(np.prod(shape)) // block * size) + -count % 32
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), count, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + nbytes + 2**16)


def tensors(model: Model) -> Iterator[tuple[Any, ...]]:
    """Yield the name, type and shape of each matrix, in the mix of llama.cpp's Q4_K_M."""
    count = len(model.layers)
    yield "token_embd", fitting(Quant.Q6_K if model.tied else Quant.Q4_K, model.width), model.vocab, model.width
    for i, layer in enumerate(model.layers):
        more_bits = i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2
        for name, rows, columns, experts in layer:
            kind = Quant.Q6_K if more_bits and name.startswith(("attn_v", "ffn_down")) else Quant.Q4_K
            shape = [rows, columns] if not experts else [experts, rows, columns]
            yield f"blk.{i}.{name}", fitting(kind, columns), *shape
    if not model.tied:
        yield "output", fitting(Quant.Q6_K, model.width), model.vocab, model.width


def fitting(quant: Quant, columns: int) -> Quant:
    """Return the type that llama.cpp takes where a row has no whole blocks of the other."""
    if columns % 256 == 0:
        return quant
    return Quant.Q5_0 if quant == Quant.Q4_K else Quant.Q8_0


def lines(model: Model, folder: Path) -> Iterator[str]:
    """Yield a line for each free memory."""
    path = folder / f"{model.name.replace(':', '-')}.gguf"
    write_header(path, model)
    with open_gguf(path) as gguf:
        opened = OpenedModel(path, model_facts(gguf), gguf=gguf)
        size = opened.facts.summary.nbytes / 1e9
        for free in FREE_GIB:
            yield f"{model.name:<16} {size:5.1f} {free:5}  {outcome(opened, int(free * GIB))}"


def outcome(model: OpenedModel, free: int) -> str:
    """Return what a machine with a GPU of so much free memory, and with llama.cpp's build for it, would do."""
    device = Device("CUDA0", CARD, free, free)
    cuda = CudaState("", "", CARD, free, free, CONTEXT_BYTES)
    settings = Settings()
    with (
        patch.object(build, "find_cuda", lambda: cuda),
        patch.object(build, "standing_gpu", lambda: StandingGpu(CARD)),
        patch.object(devices, "llama_devices", lambda *_: (device,)),
    ):
        choice = build.choose(model, settings)
    memory = OffloadedMemory(model.facts, Wish.of(settings, (device,)), sequences=settings.parallel)
    option = plan(model.facts, settings, MAIN_MEMORY, memory).chosen
    taken = next(route.name for route in choice.routes if route.taken)
    kernels = f"{taken}; our kernels: {choice.routes[0].reason or 'taken'}"
    if option is None:
        return f"{'does not fit beside 24 GiB of main memory':<{WIDTH}}{kernels}"
    placement = memory.placement(option.kv, option.context)
    num_layers = model.facts.summary.layers
    place = f"{min(placement.gpu_layers, num_layers + 1)} of {num_layers + 1} layers"
    if placement.expert_layers:
        place += f", experts of {placement.expert_layers} beside it"
    gpu = sum(part.total_bytes for part in option.devices) / GIB
    place += f", {option.context} {option.kv}, {gpu:.1f} GiB there, {option.total_bytes / GIB:.1f} in main memory"
    return f"{place:<{WIDTH}}{kernels}"


def main() -> None:
    print(f"{'model':<16} {'GB':>5} {'free':>5}  {'llama.cpp: layers on the GPU':<{WIDTH}}taken, and why not ours")
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            if not sys.argv[1:] or model.name in sys.argv[1:]:
                for text in lines(model, Path(folder)):
                    print(text, flush=True)


if __name__ == "__main__":
    main()
