"""Measures what packed INT4 costs the starter: KL divergence on held-out text, by method, group and zero points.

    python -m tests.bench.bench_int4 [--text guide|chats] [--groups 128] [--methods int4,int4-gptq] [--zero-points both]

The starter becomes a folder of safetensors in BF16. `guide`: every second page of the guide calibrates, the others
measure. `chats`: conversations as the starter sees them, with the answers quoted, of every second section.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from edgelm.backends.model import open_model
from edgelm.backends.torch.build import tokenizer_of
from edgelm.guide import FOLDER
from edgelm.knowledge.index import Knowledge
from edgelm.knowledge.quote import system_message
from edgelm.knowledge.starter import starter_passages
from edgelm.quantization.int4_job import METHODS, Int4Job
from edgelm.quantization.int4_model import quantize_folder
from tests.models.starter_folder import write_starter_folder
from tests.models.test_architectures import decoder_of
from tests.models.tiny_models import Session

QUESTIONS = FOLDER.parent / "questions"
LARGER = "qwen3:4b"
ASSISTANT, END = 3, 0  # ids of the starter
WINDOW = 1024


def guide_halves() -> tuple[str, str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md"))]
    return "\n\n".join(pages[::2]), "\n\n".join(pages[1::2])


def chat_halves(folder: Path) -> tuple[str, str]:
    """Return conversations: two questions of each section, with the passages that edgelm finds for them."""
    knowledge, rng = Knowledge(folder / "knowledge.db"), random.Random(1)
    halves: tuple[list[str], list[str]] = ([], [])
    sections = [
        part for file in sorted(QUESTIONS.glob("*.txt")) for part in re.split(r"(?m)^## ", file.read_text())[1:]
    ]
    for number, section in enumerate(sections):
        questions = [line[3:] for line in section.splitlines() if line.startswith("Q: ")]
        for question in rng.sample(questions, min(2, len(questions))):
            passages = starter_passages(knowledge, question, LARGER)
            answer = "\n\n".join(passage.text.strip("\n") for passage in passages[:2])
            chat = f"<|system|>{system_message(passages)}<|end|><|user|>{question}<|end|><|assistant|>{answer}<|end|>"
            halves[number % 2].append(chat)
    for half in halves:
        rng.shuffle(half)
    return "".join(halves[0]), "".join(halves[1])


def all_logits(folder: Path, rows: list[list[int]]) -> Tensor:
    """Return the logits of separate sequences, float32 [tokens, vocabulary]."""
    decoder = decoder_of(folder, context=2048)
    parts = []
    for row in rows:
        session = Session(decoder, num_blocks=WINDOW // 32)
        parts.append(session.run({0: row})[0])
    return torch.cat(parts)


def divergence(reference: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the mean KL divergence, and the share of tokens with the same most likely successor."""
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    same = (reference.argmax(-1) == other.argmax(-1)).float().mean()
    return float((p.exp() * (p - q)).sum(-1).mean()), float(same)


def answer_mask(rows: list[list[int]]) -> Tensor:
    mask = []
    for row in rows:
        inside = False
        for token in row:
            inside = (inside or token == ASSISTANT) and token != END
            mask.append(inside)
    return torch.tensor(mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", choices=["guide", "chats"], default="chats")
    parser.add_argument("--groups", default="128,64,32")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--zero-points", choices=["both", "no", "yes"], default="both")
    parser.add_argument("--sequences", type=int, default=24, help="of 512 tokens, for calibration")
    parser.add_argument("--windows", type=int, default=8, help="of 1,024 tokens, to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        source = write_starter_folder(place / "starter")
        calibration, held_out = guide_halves() if args.text == "guide" else chat_halves(place)
        (place / "calibration.txt").write_text(calibration, encoding="utf-8")
        with open_model(source) as opened:
            tokens = tokenizer_of(opened).encode(held_out, special=True, bos=False)
        count = min(args.windows, len(tokens) // WINDOW)
        rows = [tokens[i * WINDOW : (i + 1) * WINDOW] for i in range(count)]
        reference, answers = all_logits(source, rows), answer_mask(rows)
        print(f"{args.text}: {count} windows of {WINDOW} tokens, {int(answers.sum())} tokens of answers")
        symmetric = {"both": (True, False), "no": (True,), "yes": (False,)}[args.zero_points]
        for group, points, method in product(map(int, args.groups.split(",")), symmetric, args.methods.split(",")):
            begun, out = time.monotonic(), place / f"{method}-{group}-{points}"
            done = quantize_folder(
                Int4Job(
                    folder=source,
                    out=out,
                    method=method,
                    group=group,
                    symmetric=points,
                    calibration=place / "calibration.txt",
                    sequences=args.sequences,
                    device="cpu",
                ),
                lambda _: None,
            )
            other = all_logits(out, rows)
            kl, same = divergence(reference, other)
            line = f"{method:10} group {group:3} {'' if points else 'zeros':5} {done.bytes / 1e6:.2f} MB  KL {kl:.4f}"
            line += f"  same top {same:.1%}"
            if answers.any():
                kl, same = divergence(reference[answers], other[answers])
                line += f"  answers: KL {kl:.4f}  same top {same:.1%}"
            print(f"{line}  {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
