#!/usr/bin/env python3
"""Trains the linear model that finds the section of the guide for a question (edgelm/chats/knowledge/sections.py).

    python packaging/starter/train_sections.py

Takes two minutes. Needs torch and this checkout of edgelm. Run it when the guide's sections or their questions
change.
"""

from __future__ import annotations

import argparse
import random
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
from material import Material
from torch import Tensor
from torch.nn import EmbeddingBag
from torch.nn import functional as F

from edgelm.chats.knowledge.sections import FILE, NUM_FEATURES, features

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "edgelm" / "chats" / "knowledge" / FILE
EPOCHS, BATCH, RATE, DECAY = 6, 256, 0.05, 0.6
NUM_RUNS = 5  # whose weights are averaged: the order of the questions moves a single run by some answers


def logits(model: EmbeddingBag, questions: list[list[int]]) -> Tensor:
    """Return the scores of questions, [questions, 1 + sections]."""
    lengths = [len(question) for question in questions]
    offsets = torch.tensor([0, *accumulate(lengths[:-1])])
    return model(torch.tensor(list(chain.from_iterable(questions))), offsets) / torch.tensor(lengths)[:, None] ** 0.5


def trained(examples: list[tuple[list[int], int]], num_classes: int, rng: random.Random) -> EmbeddingBag:
    """Return a model of one run over the examples, which are shuffled."""
    model = EmbeddingBag(NUM_FEATURES, num_classes, mode="sum")
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        rng.shuffle(examples)
        for begin in range(0, len(examples), BATCH):
            texts, expected = zip(*examples[begin : begin + BATCH], strict=True)
            loss = F.cross_entropy(logits(model, list(texts)), torch.tensor(expected), label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= DECAY
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", type=float, default=0.0, help="the share of the questions that are not learnt")
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    material = Material(HERE, args.held_out)
    names = sorted({(passage.source, passage.heading) for passage in material.passages})
    numbers = {name: number for number, name in enumerate(names, 1)}

    def number_of(place: int) -> int:
        return numbers[material.passages[place].source, material.passages[place].heading]

    examples = [(features(question.text), number_of(question.passage)) for question in material.questions]
    examples += [(features(text), 0) for text in (*material.general, *material.similar)]
    examples = [(question, number) for question, number in examples if question]
    models = [trained(examples, 1 + len(names), rng) for _ in range(NUM_RUNS)]
    model = models[0]
    with torch.no_grad():
        model.weight.copy_(torch.stack([one.weight for one in models]).mean(0))
    weights = model.weight.detach().numpy()
    scales = np.abs(weights).max(axis=0) / 127
    np.savez_compressed(
        OUT, names=np.array(names), weights=np.rint(weights / scales).astype(np.int8), scales=scales.astype(np.float32)
    )
    print(f"{len(examples):,} questions, {len(names)} sections")
    if material.held_out:
        with torch.no_grad():
            texts = [features(question.text) for question in material.held_out]
            likeliest = logits(model, texts).topk(3).indices
        expected = torch.tensor([number_of(question.passage) for question in material.held_out])
        share = (likeliest == expected[:, None]).any(-1).float().mean()
        print(f"held out: {share:.2f} are among the three likeliest")


if __name__ == "__main__":
    main()
