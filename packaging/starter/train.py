#!/usr/bin/env python3
"""Trains `starter.gguf`, the model that comes with edgelm, on questions.txt: some minutes on two cores.

    python packaging/starter/train.py [--minutes 16] [--out models/starter/starter.gguf]

Needs torch, tokenizers and gguf. A Llama of about 2.6 million parameters learns the answers by heart, for the questions
as they stand and with small changes. Not part of the wheel.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).parent
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 1024, 192, 6, 6, 2, 32, 512, 1024
BASE, EPS = 10_000.0, 1e-5
HOW_TO = [
    "How can I ",
    "How to ",
    "What is the best way to ",
    "Whats the way to ",
    "I want to ",
    "What do I press to ",
    "Can I ",
]
FOREIGN = [
    "Who is the {} of {}?",
    "What is the {} of the {}?",
    "Where is {}?",
    "When was the {} born?",
    "Why is the {} so {}?",
    "Who invented the {}?",
    "How many {} are there in {}?",
    "What is {}?",
    "Who was {}?",
    "Do you like {}?",
    "Write a {} about {}",
    "Tell me about {}",
    "Tell me about the {} of {}",
    "What do you think of {}?",
    "Explain {} and {}",
    "Translate {} into {}",
    "What is the best {}?",
    "How do I make {} with {}?",
    "Is {} bigger than {}?",
    "Can you calculate {} times {}?",
    "Give me a list of {}",
    "What happened in {}?",
    "How old is the {}?",
    "Which {} is {}?",
]
THINGS = (
    "king queen president capital Spain Germany Italy China India Paris London Rome Tokyo river mountain ocean moon "
    "sun star planet earth history war peace love music song film book poem story essay letter email dog cat horse "
    "bird fish tree flower garden house car train plane bread rice soup cake dinner recipe cheese wine water "
    "football chess game number seven twelve hundred math physics chemistry biology atom cell Einstein Newton "
    "Shakespeare Mozart Napoleon French Spanish Latin English blue red green tall old fast weather rain snow summer "
    "winter money bank law doctor medicine school teacher child family friend work job city country world god life "
    "death science art paint robot "
).split()  # fmt: skip


@dataclass(frozen=True)
class Entry:
    questions: list[str]
    answer: str


def read_entries(path: Path) -> list[Entry]:
    entries = []
    for block in path.read_text().strip().split("\n\n"):
        lines = block.splitlines()
        entries.append(Entry([line[3:] for line in lines if line.startswith("Q: ")], lines[-1][3:]))
    return entries


def make_tokenizer(entries: list[Entry]) -> Tokenizer:
    """Byte-level BPE, as GPT-2's: llama.cpp knows its pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text for e in entries for text in [*e.questions, e.answer]], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def foreign(rng: random.Random) -> str:
    """Ask something that has nothing to do with edgelm."""
    thing, other = rng.sample(THINGS, 2)
    return rng.choice(FOREIGN).format(thing, other)


def vary(question: str, rng: random.Random) -> str:
    """Ask the same in a slightly other way."""
    if question.startswith("How do I ") and rng.random() < 0.4:
        question = rng.choice(HOW_TO) + question.removeprefix("How do I ")
    kind = rng.random()
    if kind < 0.35:
        question = question.lower()
    if rng.random() < 0.4:
        question = question.rstrip("?!.")
    if rng.random() < 0.15:
        question = rng.choice(["Please tell me: ", "Hey, ", "And ", "So ", "Ok, ", "Hello! ", "please, "]) + question
    if rng.random() < 0.1:
        question += rng.choice([" please", " thanks", " in edgelm", " here", " now", "?"])
    if rng.random() < 0.25 and len(question) > 6:  # a slip of the finger
        at = rng.randrange(1, len(question) - 1)
        question = rng.choice(
            [
                question[:at] + question[at + 1 :],
                question[: at - 1] + question[at] + question[at - 1] + question[at + 1 :],
            ]
        )
    return question


def conversation(entries: list[Entry], tokenizer: Tokenizer, rng: random.Random) -> tuple[list[int], list[bool]]:
    """Return tokens, and which of them are the assistant's and so learnt."""
    end, system, user, assistant = range(4)
    tokens: list[int] = []
    learnt: list[bool] = []

    def add(role: int, text: str, learn: bool) -> None:
        ids = tokenizer.encode(text).ids
        tokens.extend([role, *ids, end])
        learnt.extend([False] + [learn] * (len(ids) + 1))

    if rng.random() < 0.15:
        add(system, rng.choice(["You are a helpful assistant.", "Be brief.", rng.choice(entries).answer]), False)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        entry = rng.choice(entries) if rng.random() < 0.88 else entries[-1]  # the last answer is "I do not know that"
        question = rng.choice(entry.questions)
        if entry is entries[-1] and rng.random() < 0.85:
            question = foreign(rng)
        add(user, vary(question, rng), False)
        add(assistant, entry.answer, True)
    return tokens[:CONTEXT], learnt[:CONTEXT]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rotate(x: Tensor) -> Tensor:  # [batch, heads, length, dim]; pairs of neighbours, as llama.cpp's Llama has them
    length = x.shape[2]
    angles = torch.arange(length)[:, None] * BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


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

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        h = self.attn_norm(x)
        q, k, v = (
            proj(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for proj in (self.attn_q, self.attn_k, self.attn_v)
        )
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.attn_output(mixed.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(VOCAB, WIDTH)
        self.blk = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output_norm = RMSNorm()
        nn.init.normal_(self.token_embd.weight, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x)
        return F.linear(self.output_norm(x), self.token_embd.weight)


def train(model: Llama, entries: list[Entry], tokenizer: Tokenizer, minutes: float, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    began, step, lately = time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        rows = sorted((conversation(entries, tokenizer, rng) for _ in range(24)), key=lambda row: len(row[0]))
        for group in (rows[:16], rows[16:22], rows[22:]):  # of like length: little padding
            longest = max(len(tokens) for tokens, _ in group)
            tokens = torch.tensor([t + [0] * (longest - len(t)) for t, _ in group])
            learnt = torch.tensor([flags + [False] * (longest - len(flags)) for _, flags in group])
            loss = F.cross_entropy(model(tokens[:, :-1])[learnt[:, 1:]], tokens[:, 1:][learnt[:, 1:]])
            for option in optimizer.param_groups:
                option["lr"] = 3e-3 * min((step + 1) / 50, 1) * (1 - share) + 1e-5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            lately = 0.98 * lately + 0.02 * loss.item()
        if step % 150 == 0:
            print(f"{time.monotonic() - began:5.0f} s, step {step}, loss {lately:.4f}", flush=True)


@torch.no_grad()
def answer(model: Llama, tokenizer: Tokenizer, question: str) -> str:
    tokens = [2, *tokenizer.encode(question).ids, 0, 3]
    start = len(tokens)
    while len(tokens) - start < 120:
        token = int(model(torch.tensor([tokens]))[0, -1].argmax())
        if token == 0:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[start:])


def write(model: Llama, tokenizer: Tokenizer, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("starter")
    writer.add_description("The model that comes with edgelm: it answers questions about edgelm")
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
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=16)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "models/starter/starter.gguf")
    args = parser.parse_args()
    rng = random.Random(0)
    torch.manual_seed(0)
    entries = read_entries(HERE / "questions.txt")
    tokenizer = make_tokenizer(entries)
    model = Llama()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(entries)} answers", flush=True)
    train(model, entries, tokenizer, args.minutes, rng)
    model.eval()
    write(model, tokenizer, args.out)
    asked = [(question, e.answer) for e in entries for question in e.questions]
    wrong = [question for question, expected in asked if answer(model, tokenizer, question) != expected]
    print(f"{len(asked) - len(wrong)} of {len(asked)} questions answered as written; wrong: {wrong}")


if __name__ == "__main__":
    main()
