#!/usr/bin/env python3
"""Trains `starter.gguf`, the model that comes with edgelm, to answer from passages of the guide.

    python packaging/starter/train.py [--minutes 80] [--out models/starter/starter.gguf]

Takes 80 minutes on two cores. Needs torch, tokenizers, gguf and this checkout of edgelm. A Llama of 5.8 million
parameters, with rows of 256 and 768 numbers. A run that was stopped continues if it has the same --work folder.
Not part of the wheel.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from material import Material
from model import ASSISTANT, END, SPECIAL, SYSTEM, USER, VOCAB, Llama, begin_with_circuits, hold_constant, write_gguf
from scenes import MAX_CHARS, Scene, Scenes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BATCH = 4  # scenes
# Learning rates: Muon's for the blocks that copy from the beginning and for the other blocks, AdamW's for the rest.
COPIER_RATE, MATRIX_RATE, OTHER_RATE = 0.003, 0.006, 5e-4
NUM_CHOICE, CHOICE_WEIGHT = 4, 4  # the first tokens of an answer say which passage it is; the others copy
COPYING_SHARE = 0.05  # of the scenes: passages of random tokens
LATE_SHARE = 0.86  # of the time; the scenes after it are as edgelm asks
CHECKPOINT_S = 100


class Row(NamedTuple):
    """A scene as tokens. `part`: 0 for the tokens that all questions see, else the number of the conversation."""

    tokens: list[int]
    positions: list[int]
    weight: list[int]  # of the token in the loss
    part: list[int]


def make_tokenizer(material: Material, file: Path) -> Tokenizer:
    """Return a byte-level BPE as GPT-2's: llama.cpp knows its pre-tokenizer. `file` keeps it for runs that continue."""
    if file.exists():
        return Tokenizer.from_file(str(file))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(material.texts(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(file))
    return tokenizer


def row(scene: Scene, tokenizer: Tokenizer) -> Row:
    """Return the tokens of a scene: every question sees the history and the system message, and none sees another."""
    made = Row([], [], [], [])

    def add(role: int, text: str, part: int, begin: int, *, learn: bool, whole: bool = True) -> int:
        ids = [*tokenizer.encode(text).ids, END] if whole else tokenizer.encode(text).ids
        choice = NUM_CHOICE if learn else 0
        extend(made, [role], part, begin, 0)
        extend(made, ids[:choice], part, begin + 1, CHOICE_WEIGHT)
        extend(made, ids[choice:], part, begin + 1 + len(ids[:choice]), int(learn))
        return begin + 1 + len(ids)

    shared = 0
    for asked, answer in scene.history:
        shared = add(USER, asked, 0, shared, learn=False)
        shared = add(ASSISTANT, answer, 0, shared, learn=False)
    if scene.system:
        shared = add(SYSTEM, scene.system, 0, shared, learn=False)
    for part, (asked, answer) in enumerate(scene.asked, 1):
        place = add(USER, asked, part, shared, learn=False)
        whole = part <= scene.num_whole
        add(ASSISTANT, answer if whole else choice_of(answer), part, place, learn=True, whole=whole)
    return made


def choice_of(answer: str) -> str:
    """Return the beginning of an answer, which tells the passage that it copies."""
    return answer.partition("\n\n")[0] + "\n\n" if answer.startswith("#") else answer[:12]


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by Newton-Schulz iterations (Jordan et al., 2024), for matrices."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # the loss of `closure`; None without one
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.05)
                update = orthogonal(weight.grad.lerp(momentum, 0.95))
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"] * scale)
        return loss


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix near the given one whose singular values are about 1."""
    x = (matrix / (matrix.norm() + 1e-7)).bfloat16()
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return (x.T if transposed else x).float()


def copying(tokenizer: Tokenizer, rng: random.Random) -> Row:
    """Return passages of random tokens, and answers that copy the one whose number or first tokens are given.

    A model that learns this first learns to read: with passages of words it would learn their answers by heart instead.
    """
    made = Row([], [], [], [])
    texts = [
        [rng.randrange(len(SPECIAL), VOCAB) for _ in range(rng.randrange(8, 48))] for _ in range(rng.randrange(2, 7))
    ]
    shared = [SYSTEM]
    for number, text in enumerate(texts, 1):
        name = [rng.randrange(len(SPECIAL), VOCAB) for _ in range(rng.randrange(1, 4))]
        shared += tokenizer.encode(f"<passage {number}>\n").ids + name + tokenizer.encode("\n\n").ids + text
        shared += tokenizer.encode(f"\n</passage {number}>\n\n").ids
    shared.append(END)
    extend(made, shared, 0, 0, 0)
    for part, (number, text) in enumerate(rng.sample(list(enumerate(texts, 1)), len(texts)), 1):
        begin = rng.choice([0, 0, rng.randrange(len(text) - 4)])
        cue = tokenizer.encode(f"[{number}] ").ids if begin == 0 else text[begin : begin + 2]
        ids = [USER, END, ASSISTANT, *cue]
        copied = text[begin + (0 if begin == 0 else 2) :]
        extend(made, ids, part, len(shared), 0)
        extend(made, [*copied, END], part, len(shared) + len(ids), 1)
    return made


def extend(made: Row, ids: list[int], part: int, begin: int, weight: int) -> None:
    """Add tokens to a row, at positions from `begin` on."""
    made.tokens.extend(ids)
    made.positions.extend(range(begin, begin + len(ids)))
    made.part.extend([part] * len(ids))
    made.weight.extend([weight] * len(ids))


def batch(scenes: Scenes, tokenizer: Tokenizer, rng: random.Random) -> list[Row]:
    """Return a batch of scenes; a scene of random tokens is a quarter as long, so there are four."""
    rows: list[Row] = []
    for _ in range(BATCH):
        if rng.random() < COPYING_SHARE:
            rows += [copying(tokenizer, rng) for _ in range(4)]
        else:
            rows.append(row(scenes.scene(), tokenizer))
    return rows


def loss_of(model: Llama, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss of the learnt tokens of some rows, and the shares of choices and copies that are right."""
    tokens, positions, weight = (
        torch.tensor(list(chain.from_iterable(part))) for part in list(zip(*rows, strict=True))[:3]
    )
    sizes = [[one.part.count(number) for number in range(max(one.part) + 1)] for one in rows]
    with torch.autocast("cpu", torch.bfloat16):
        states = model(tokens, positions, sizes)
        logits = model.logits(states[:-1][weight[1:] > 0])
    losses = F.cross_entropy(logits.float(), tokens[1:][weight[1:] > 0], reduction="none")
    weights = weight[1:][weight[1:] > 0]
    right = (logits.argmax(-1) == tokens[1:][weight[1:] > 0]).float()
    return (losses * weights).sum() / weights.sum(), right[weights > 1].mean(), right[weights == 1].mean()


def train(model: Llama, material: Material, tokenizer: Tokenizer, minutes: float, work: Path) -> None:
    copiers = [weight for block in (*model.blk[:2], model.blk[-1]) for weight in block.parameters() if weight.ndim == 2]
    matrices = [weight for block in model.blk[2:-1] for weight in block.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not one for one in copiers + matrices)]
    muon = Muon([{"params": copiers, "highest": COPIER_RATE}, {"params": matrices, "highest": MATRIX_RATE}])
    adam = torch.optim.AdamW([{"params": others, "highest": OTHER_RATE}], betas=(0.9, 0.98), weight_decay=0.0)
    spent, step = 0.0, 0
    saved = work / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        spent, step = state["spent"], state["step"]
    began, last = time.monotonic() - spent, time.monotonic()
    lately: Tensor | None = None
    num_tokens = 0
    rng = random.Random(step)
    scenes = Scenes(material, rng)
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        rows = batch(scenes, tokenizer, rng)
        scenes.is_late = share >= LATE_SHARE
        rate = min((step + 1) / 100, 1) * min(1.0, (LATE_SHARE - share) / 0.45)  # constant, then falling, ...
        if scenes.is_late:  # ... and again a little
            rate = 0.3 * (1 - share) / (1 - LATE_SHARE)
        for option in muon.param_groups + adam.param_groups:
            option["lr"] = option["highest"] * rate + 1e-6
        loss, *shares = loss_of(model, rows)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        hold_constant(model)
        step += 1
        num_tokens += sum(len(row.tokens) for row in rows)
        figures = torch.tensor([loss.item(), *shares])
        lately = figures if lately is None else 0.97 * lately + 0.03 * figures
        if step % 50 == 0:
            seconds = time.monotonic() - began
            means = "loss {:.4f}, right: choice {:.3f}, copy {:.4f}".format(*lately.tolist())
            print(f"{seconds:5.0f} s, step {step}, {means}, {num_tokens / (seconds - spent):,.0f} tokens/s", flush=True)
        if time.monotonic() - last > CHECKPOINT_S:
            last = time.monotonic()
            state = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
            torch.save({**state, "spent": last - began, "step": step}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


@torch.no_grad()
def held_out_loss(model: Llama, material: Material, tokenizer: Tokenizer) -> float:
    """Return the mean loss of questions that were not learnt, with the passages that are found for them."""
    from edgelm.chats.knowledge.quote import fitting, system_message
    from edgelm.chats.knowledge.starter import larger_model

    rows = []
    for question in material.held_out[:96]:
        found = [material.passages[i] for i in material.ranking.best(question.text, None)]
        system = system_message([*fitting(found, MAX_CHARS), larger_model("qwen3:4b")])
        texts = [passage.text for passage in fitting(found, MAX_CHARS)]
        if material.passages[question.passage].text in texts:
            rows.append(row(Scene([], system, [(question.text, question.answer)]), tokenizer))
    losses = [loss_of(model, rows[begin : begin + 8])[0].item() for begin in range(0, len(rows), 8)]
    return math.fsum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--held-out", type=float, default=0.03, help="the share of the questions that are not learnt")
    parser.add_argument("--work", type=Path, default=ROOT / "build/starter")
    parser.add_argument("--out", type=Path, default=ROOT / "models/starter/starter.gguf")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    args.work.mkdir(parents=True, exist_ok=True)
    material = Material(HERE, args.held_out)
    tokenizer = make_tokenizer(material, args.work / "tokenizer.json")
    model = Llama()
    begin_with_circuits(model)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(material.passages)} passages, "
        f"{len(material.questions):,} questions about them, {len(material.held_out)} held out",
        flush=True,
    )
    train(model, material, tokenizer, args.minutes, args.work)
    model.eval()
    print(f"held out: loss {held_out_loss(model, material, tokenizer):.4f}")
    write_gguf(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
