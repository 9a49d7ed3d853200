"""Writes a tiny BERT of transformers with random weights as a GGUF, as llama.cpp's converter does.

Owns that mapping and a WordPiece vocabulary of some hundred tokens. Knows nothing of edgelm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "the cat dog sat on mat a red house is of and what which berlin paris capital germany france city rain".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'"
VOCABULARY = [*SPECIAL, *LETTERS, *WORDS, *(f"##{letter}" for letter in LETTERS), "##s", "##ing", "日", "本", "é"]
VOCABULARY = list(dict.fromkeys(VOCABULARY))
CONTEXT = 640  # longer than llama.cpp's micro-batch
POOLINGS = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "rank": PoolingType.RANK}
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "pooler.dense": "cls",
    "classifier": "cls.output",
}


def tiny_bert(seed: int = 0, *, ranks: bool = False) -> Any:
    """Return a model of transformers: a `BertModel`, or one with a classifier of one output."""
    import torch  # here, as each process that collects tests would wait three seconds for them
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=CONTEXT,
        num_labels=1,
        initializer_range=0.1,
    )
    model: Any = BertForSequenceClassification(config) if ranks else BertModel(config, add_pooling_layer=False)
    return model.eval()


def write_bert(model: Any, path: Path, pooling: Literal["mean", "cls", "rank"] = "mean") -> Path:
    """Write the model as a GGUF, in F32."""
    config = model.config
    writer = GGUFWriter(path, "bert")
    writer.add_name(path.stem)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(POOLINGS[pooling])
    if pooling == "rank":
        writer.add_classifier_output_labels(["LABEL_0"])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([_phantom(token) for token in VOCABULARY])
    writer.add_token_types(
        [
            TokenType.UNKNOWN if token == "[UNK]" else TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL
            for token in VOCABULARY
        ]
    )
    writer.add_token_type_count(2)
    for name in ("unk", "sep", "pad", "mask"):
        getattr(writer, f"add_{name}_token_id")(VOCABULARY.index(f"[{name.upper()}]"))
    writer.add_bos_token_id(VOCABULARY.index("[CLS]"))
    writer.add_eos_token_id(VOCABULARY.index("[SEP]"))
    for name, parameter in model.named_parameters():
        writer.add_tensor(_gguf_name(name.removeprefix("bert.")), parameter.detach().float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    base, kind = name.rsplit(".", 1)
    if base.startswith("encoder.layer."):
        _, _, number, rest = base.split(".", 3)
        return f"blk.{number}.{NAMES[rest]}.{kind}"
    return f"{NAMES[base]}.{kind}"


def _phantom(token: str) -> str:
    """Return a token of WordPiece as llama.cpp has it: words begin with a space, and their rest has no mark."""
    if token in SPECIAL:
        return token
    return token[2:] if token.startswith("##") else "\u2581" + token
