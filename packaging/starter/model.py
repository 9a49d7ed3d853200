"""The starter's architecture: a Llama of 5.8 million parameters whose first weights can copy already, and its GGUF.

Owns the sizes, the forward pass for questions that share their passages, and the first weights. Knows nothing of
texts and of training.
"""

from __future__ import annotations

import json
import math
from itertools import chain, islice
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from edgelm.chats.knowledge.starter import CONTEXT

SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
END, SYSTEM, USER, ASSISTANT = range(4)
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 4096, 256, 6, 4, 2, 64, 768
BASE, EPS = 100_000_000.0, 1e-5
# The strengths of the circuits' first weights, tried on copies of random tokens before any training.
MATCH = 3.0  # of two equal tokens, in the scores
WRITE, TOLD = 0.3, 1.0  # of the token that follows them: in the residual stream, and in front of the logits
RECENT = 0.12  # of the mean of the recent tokens
CONSTANT = 8.0  # dimension 0 of an embedding beside the root mean square of the others


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.weight, EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours, as llama.cpp's Llama does. x: [tokens, heads, dim]; cos and sin: [tokens, 1, dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


HIDDEN = -30_000.0  # a score that leaves no weight
CAUSAL = torch.full((2048, 2048), HIDDEN, dtype=torch.bfloat16).triu(1)


Sizes = list[list[int]]  # numbers of tokens by scene: of the part that all its questions see, then of every question


def attention(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes) -> Tensor:
    """Attention question by question, [tokens, heads, dim]: without padding, and within a scene."""
    flat = list(chain.from_iterable(sizes))
    parts = zip(*(x.transpose(0, 1).split(flat, dim=1) for x in (q, k, v)), strict=True)  # [heads, tokens, dim]
    mixed = []
    for scene in sizes:
        first_q, first_k, first_v = next(parts)
        mixed.append(weighted(first_q, first_k, first_v, 0))
        for own_q, own_k, own_v in islice(parts, len(scene) - 1):
            keys, values = torch.cat([first_k, own_k], dim=1), torch.cat([first_v, own_v], dim=1)
            mixed.append(weighted(own_q, keys, values, scene[0]))
    return torch.cat(mixed, dim=1).transpose(0, 1)


def weighted(q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
    """Return the mean of values, weighted by their keys' scores; the first query sees `seen` keys before its own."""
    bias = CAUSAL[seen : seen + q.shape[1], : k.shape[1]].expand(HEADS, -1, -1)
    scores = torch.baddbmm(bias, q * HEAD_DIM**-0.5, k.transpose(1, 2))
    return scores.float().softmax(-1).to(v.dtype) @ v


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = RMSNorm(), RMSNorm()
        self.attn_q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.attn_k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.attn_v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.attn_output = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.ffn_gate = nn.Linear(WIDTH, FFN, bias=False)
        self.ffn_up = nn.Linear(WIDTH, FFN, bias=False)
        self.ffn_down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sizes: Sizes) -> Tensor:  # x: [tokens, width]
        h = self.attn_norm(x)
        q, k, v = (proj(h).unflatten(-1, (-1, HEAD_DIM)) for proj in (self.attn_q, self.attn_k, self.attn_v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = HEADS // KV_HEADS
        mixed = attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), sizes)
        x = x + self.attn_output(mixed.flatten(-2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(VOCAB, WIDTH)
        self.blk = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output_norm = RMSNorm()
        nn.init.normal_(self.token_embd.weight, std=WIDTH**-0.5)
        for block in self.blk:
            for last in (block.attn_output, block.ffn_down):
                nn.init.zeros_(last.weight)

    def forward(self, tokens: Tensor, positions: Tensor, sizes: Sizes) -> Tensor:
        """Return the normalized hidden states, [tokens, width]."""
        angles = positions[:, None, None] * BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = angles.cos(), angles.sin()
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, cos, sin, sizes)
        return self.output_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight)


@torch.no_grad()
def begin_with_circuits(model: Llama) -> None:
    """Give a new model heads that copy and heads that see the question; training alone would find them after hours.

    To copy: an induction head (Olsson et al., In-context Learning and Induction Heads, 2022) over the last two tokens.
    In block 0, head 0 attends to the token before and head 2 to the one before it, by positions alone: dimension 0 of
    every embedding is the same, and the phases of k are those of one and two positions. In block 1, head 0 compares
    the last two tokens with those before every other token, in the slow part of its rotations, and writes the token
    that it finds, weakly: the last block's FFN makes it strong. To see the question: in block 2, heads 0 and 2 write
    the mean of the last fifteen tokens or so, where a new head would see the mean of a thousand.
    """
    hold_constant(model)
    first, second, third, last = model.blk[0], model.blk[1], model.blk[2], model.blk[-1]
    constant = CONSTANT * (1 + CONSTANT**2 / WIDTH) ** -0.5  # dimension 0 of an embedding behind RMSNorm
    constant_later = constant / 2  # behind block 1, which adds to the other dimensions
    kept, earlier, told = directions(3).split(HEAD_DIM)
    before = directions(1)

    def rows(head: int) -> slice:
        return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)

    for block in (first, second, third):
        block.attn_q.weight[rows(0)] = 0
        block.attn_k.weight[rows(0)] = 0
    for block in (first, third):
        block.attn_q.weight[rows(2)] = 0
        block.attn_k.weight[rows(1)] = 0
    for back, head, kv_head, place in ((1, 0, 0, kept), (2, 2, 1, earlier)):
        for pair in range(8):
            angle = back * BASE ** (-2 * pair / HEAD_DIM)
            first.attn_q.weight[head * HEAD_DIM + 2 * pair, 0] = 8 / constant
            first.attn_k.weight[kv_head * HEAD_DIM + 2 * pair, 0] = 8 * math.cos(angle) / constant
            first.attn_k.weight[kv_head * HEAD_DIM + 2 * pair + 1, 0] = 8 * math.sin(angle) / constant
        first.attn_v.weight[rows(kv_head)] = before
        first.attn_output.weight[:, rows(head)] = 0.15 * place.T
    newest, older = slice(24, 44), slice(44, 64)  # slow: a thousand positions turn them by less than a radian
    for matrix, at_newest, at_older in ((second.attn_q, before, kept), (second.attn_k, kept, earlier)):
        matrix.weight[newest] = MATCH * at_newest[:20]
        matrix.weight[older] = MATCH * at_older[:20]
    second.attn_v.weight[rows(0)] = told
    second.attn_output.weight[:, rows(0)] = WRITE * told.T
    last.ffn_gate.weight[rows(0)] = 0
    last.ffn_gate.weight[rows(0), 0] = 1
    last.ffn_up.weight[rows(0)] = told
    last.ffn_down.weight[:, rows(0)] = TOLD * told.T
    model.output_norm.weight[:] = 1.5
    for kv_head, head in ((0, 0), (1, 2)):
        for pair in range(5, 9):  # these rotations turn by half a radian or so within a question
            third.attn_q.weight[head * HEAD_DIM + 2 * pair, 0] = 5 / constant_later
            third.attn_k.weight[kv_head * HEAD_DIM + 2 * pair, 0] = 5 / constant_later
        third.attn_v.weight[rows(kv_head)] = directions(1)
        third.attn_output.weight[:, rows(head)] = RECENT * directions(1).T


def directions(num_heads: int) -> Tensor:
    """Return random orthonormal rows that do not touch dimension 0, [heads * HEAD_DIM, WIDTH]."""
    rows = torch.linalg.qr(torch.randn(WIDTH - 1, num_heads * HEAD_DIM)).Q.T
    return torch.cat([torch.zeros(num_heads * HEAD_DIM, 1), rows], dim=1)


@torch.no_grad()
def hold_constant(model: Llama) -> None:
    """Keep dimension 0 of all embeddings equal, and as large beside the others as it was."""
    embedding = model.token_embd.weight
    embedding[:, 0] = CONSTANT * embedding[:, 1:].pow(2).mean().sqrt()


def write_gguf(model: Llama, tokenizer: Tokenizer, path: Path) -> None:
    """Write the model in Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("starter")
    writer.add_description(
        "The model that comes with edgelm: it answers questions about edgelm from passages of the guide"
    )
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(BASE)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(VOCAB)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in vocabulary])
    kinds = [gguf.TokenType.CONTROL if text in SPECIAL else gguf.TokenType.NORMAL for text, _ in vocabulary]
    writer.add_token_types(kinds)
    state = json.loads(tokenizer.to_str())
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
