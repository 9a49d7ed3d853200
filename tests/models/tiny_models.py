"""Tiny models of every family with random weights, written by transformers, and a way to run a decoder over a cache.

Owns the configurations, the weights and the blocks of the cache. The weights are as large as trained ones, so that
attention, norms, biases, sinks and soft caps all show in the logits.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgelm.kernels.cache import BLOCK_LEN, FORMATS
from edgelm.models.decoder import Batch, Decoder

VOCAB = 96
NUM_STATES = 8
WINDOW = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
GROWING = {  # the factor of the scale is 1, and queries grow after 16 positions
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.4,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 0.5 * i for i in range(6)],
    "original_max_position_embeddings": 128,
}
DELTA: dict[str, Any] = {  # the last layer attends; value heads share keys, and are as wide as no other head
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
ROUTERS = ("mlp.gate.weight", "router.weight", "router.proj.weight")
# by name: model_type, and the values that differ from SIZES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"rms_norm_eps": 1e-5}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "ministral3": ("ministral3", {"rope_parameters": GROWING}),
    "granite": (
        "granite",
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.125,
            "logits_scaling": 10.0,
            "rms_norm_eps": 1e-3,
        },
    ),
    "mixtral": ("mixtral", {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": 16}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma4": (  # the last layer has longer heads, fewer of keys, and values that are keys
        "gemma4_text",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_moe": (
        "gemma4_text",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "phi3": (
        "phi3",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 128,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"sliding_window": WINDOW, "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a transformers model with random weights, in float32, ready to run."""
    import transformers  # here, as each process that collects tests would wait for it

    model_type, options = MODELS[name]
    options = copy.deepcopy({**SIZES, **options, **changes})
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(model_type, **options)
    config._attn_implementation = "eager"  # the only one with soft caps and sinks
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            offset = name in ("gemma", "gemma2", "gemma3") or (name.startswith("qwen3_5") and "linear_attn" not in key)
            tensor.copy_(_random(key, tensor, generator, centre=0.0 if offset else 1.0))
            if name.startswith("gemma4") and key.endswith(("q_norm.weight", "k_norm.weight")):
                tensor.mul_(0.4)  # nothing else scales the logits of attention
        for key, tensor in model.named_buffers():
            if key.endswith("layer_scalar"):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return model


def _random(key: str, tensor: Tensor, generator: torch.Generator, centre: float) -> Tensor:
    values = torch.randn(tensor.shape, generator=generator)
    if key.endswith(("norm.weight", "layernorm.weight", "layernorm_1.weight", "layernorm_2.weight", "expert_scale")):
        return centre + 0.2 * values
    if key.endswith("router.scale"):
        return (centre + 0.2 * values) * tensor.shape[-1] ** 0.5  # the router divides by that
    if key.endswith("A_log"):  # states fade within a few tokens, or in a hundred
        return values - 1.0
    if "bias" in key or "sinks" in key:
        return 0.5 * values
    gain = 4.0 if key.endswith(ROUTERS) else 1.0  # bfloat16 may choose another last expert, with a small weight
    transposed = key.endswith(("experts.gate_up_proj", "experts.down_proj")) and "bias" not in key
    columns = tensor.shape[-2] if transposed and tensor.shape[-1] != SIZES["hidden_size"] else tensor.shape[-1]
    return gain * values * columns**-0.5


@cache
def built(name: str) -> Any:
    """Return the same model for all tests of a process, which must not change it."""
    return build(name)


def write(model: Any, folder: Path) -> Path:
    """Save a model as users have it: safetensors and config.json."""
    model.save_pretrained(folder)
    return folder


def add_head(folder: Path, *, stacked: bool = False) -> None:
    """Add a head that predicts the token after the next one to a folder of Qwen 3.5; transformers ignores it.

    `stacked`: the head's experts are two tensors, as some folders of the hub have them.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    width = SIZES["hidden_size"]
    attending = {name: tensor for name, tensor in tensors.items() if ".layers.3." in name}
    head = {f"mtp.layers.0.{name.split('.layers.3.')[1]}": tensor for name, tensor in attending.items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    head |= {f"mtp.{name}.weight": torch.zeros(width) for name in norms}
    head["mtp.fc.weight"] = torch.zeros(width, 2 * width)
    generator = torch.Generator().manual_seed(4)
    head = {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 if "norm" in name else tensor.shape[-1] ** -0.5)
        for name, tensor in head.items()
    }
    save_file(tensors | (stacked_experts(head) if stacked else head), path, {"format": "pt"})


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a folder with all experts of a layer in two of them."""
    apart = {name: match for name in tensors if (match := EXPERT.fullmatch(name))}
    stacks = {name: tensor for name, tensor in tensors.items() if name not in apart}
    for stem in sorted({match[1] for match in apart.values()}):
        count = sum(match[1] == stem and match[3] == "down" for match in apart.values())
        gate, up, down = (
            torch.stack([tensors[f"{stem}{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        )
        stacks |= {f"{stem}gate_up_proj": torch.cat([gate, up], 1), f"{stem}down_proj": down}
    return stacks


def expected(model: Any, ids: list[int]) -> Tensor:
    """Return transformers' logits for a whole text, float32 [tokens, vocabulary]."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


@dataclass
class Session:
    """A decoder with its own cache. Sequences take the blocks that they need, in another order than theirs."""

    decoder: Decoder
    cache_dtype: torch.dtype = torch.float32
    num_blocks: int = 16
    format: str = "f16"
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = self.decoder.new_caches(FORMATS[self.format], self.num_blocks, NUM_STATES, self.cache_dtype)
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(7))
        self._free = order.tolist()

    def run(self, chunks: dict[int, list[int]], padding: int = 0) -> dict[int, Tensor]:
        """Run the next tokens of some sequences as one batch; return the logits of all rows of each.

        `padding`: so many rows and sequences more, which are nobody's, as in a CUDA graph of fixed sizes.
        """
        ids, positions, slots, starts, states = [], [], [], [0], []
        for sequence, tokens in chunks.items():
            table = self.tables.setdefault(sequence, [])
            first = self.lengths.get(sequence, 0)
            end = self.lengths[sequence] = first + len(tokens)
            while len(table) * BLOCK_LEN < end:
                table.append(self._free.pop())
            ids += tokens
            positions += range(first, end)
            slots += [table[p // BLOCK_LEN] * BLOCK_LEN + p % BLOCK_LEN for p in range(first, end)]
            starts.append(len(ids))
            states.append([sequence, first, end])
        width = max(len(self.tables[sequence]) for sequence in chunks)
        padded = [self.tables[sequence] + [0] * (width - len(self.tables[sequence])) for sequence in chunks]
        lengths = [self.lengths[sequence] for sequence in chunks]
        batch = Batch(
            positions=torch.tensor(positions + [0] * padding, dtype=torch.int32),
            slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
            block_tables=torch.tensor(padded + [[0] * width] * padding, dtype=torch.int32),
            query_start_loc=torch.tensor(starts + starts[-1:] * padding, dtype=torch.int32),
            seq_lens=torch.tensor(lengths + [0] * padding, dtype=torch.int32),
            max_query_len=max(map(len, chunks.values())),
            states=torch.tensor(states + [[0, 0, 0]] * padding, dtype=torch.int32),
        )
        ids += [0] * padding
        with torch.no_grad():
            hidden = self.decoder.forward(torch.tensor(ids, dtype=torch.int32), batch, self.caches)
            logits = self.decoder.logits(hidden)
        parts = torch.split(logits[: len(logits) - padding], [len(tokens) for tokens in chunks.values()])
        return dict(zip(chunks, parts, strict=True))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest error of a row relative to the row's largest logit."""
    return float(((got - want).abs().amax(-1) / want.abs().amax(-1)).max())


def mean_relative_error(got: Tensor, want: Tensor) -> float:
    """Return the root mean square of all errors relative to that of the logits."""
    return float((got - want).norm() / want.norm())


def text(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
