"""The starter as a folder of safetensors with its tokenizer, as users have models: for what is made from such folders.

Owns the names and the order of rows of a Llama in transformers, which are not those of a GGUF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from edgelm.checkpoints.gguf import open_gguf
from edgelm.library.local import find_local

CONTROL = 3
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOKENS_OF = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}


def write_starter_folder(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the starter with weights of this type; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = find_local("starter").path
    with open_gguf(path) as opened:
        metadata = {
            key: list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
            for key, value in opened.metadata.items()
        }
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
        name, part = _name(tensor.name)
        tensors[name] = (_halves(values, heads[part]) if part in heads else values).to(dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(metadata, dtype), indent=2))
    _write_tokenizer(folder, metadata)
    return folder


def _name(name: str) -> tuple[str, str]:
    """Return the name in safetensors, and the part of a layer that it is."""
    if name.startswith("blk."):
        _, i, part, _ = name.split(".")
        return f"model.layers.{i}.{NAMES[part]}.weight", part
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name], name


def _halves(values: Tensor, heads: int) -> Tensor:
    """Order the rows of each head by halves, as transformers rotates them; a GGUF's Llama has pairs."""
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _config(metadata: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    value = {key.removeprefix("llama."): entry for key, entry in metadata.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value["vocab_size"],
        "hidden_size": value["embedding_length"],
        "intermediate_size": value["feed_forward_length"],
        "num_hidden_layers": value["block_count"],
        "num_attention_heads": value["attention.head_count"],
        "num_key_value_heads": value["attention.head_count_kv"],
        "head_dim": value["attention.key_length"],
        "max_position_embeddings": value["context_length"],
        "rms_norm_eps": value["attention.layer_norm_rms_epsilon"],
        "rope_theta": value["rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": value["rope.freq_base"]},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
        "add_bos_token": False,
    }
    config |= {name: tokens[metadata[f"tokenizer.ggml.{key}"]] for name, key in TOKENS_OF.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
