"""KL divergence against size: types chosen by measurement beside llama.cpp's own mixtures of the same size.

    python -m tests.bench.bench_quantize_auto [--importance FILE.npz] [--text] [--sizes Q4_K_M ...]

The model is the starter, dequantized to F32. It is measured as it is used: passages of the guide, a question, and the
answer, whose tokens are scored. The questions of every other section calibrate, those of the others judge. Beside it
the plain text of the guide, which the starter was not trained to write.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.evaluation import load_llama_evaluation
from edgelm.base.workers.messages import EvalSide
from edgelm.chats.knowledge.guide import FOLDER
from edgelm.chats.knowledge.quote import system_message
from edgelm.chats.knowledge.starter import guide_passages, larger_model
from edgelm.checkpoints.gguf import open_gguf
from edgelm.evaluation.evaluate import window_logits
from edgelm.evaluation.scores import Logits, score
from edgelm.evaluation.text import Window
from edgelm.making.quantization.automatic import Effort, choose_types
from edgelm.making.quantization.chosen_types import NativeQuantizer
from edgelm.making.quantization.divergence import Cut, TextCut
from edgelm.making.quantization.recipe import Recipe
from edgelm.making.quantization.sensitivity import Importance
from edgelm.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
STARTER = ROOT / "models" / "starter" / "starter.gguf"
QUESTIONS = ROOT / "edgelm" / "guide" / "questions"
END, SYSTEM, USER, ASSISTANT = range(4)  # tokens of the starter
CONTEXT = 1024
SIZES = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")
CALIBRATION, JUDGEMENT = 0, 1  # halves
QUANTIZER = NativeQuantizer(threads=2)


class Scenes:
    """A `Cut`: prompts of the starter, with their answers. `half` says of which sections."""

    window: int | None = CONTEXT

    def __init__(self, count: int, half: int) -> None:
        self.key = f"scenes {count} {half}"
        self._count = count
        self._half = half

    def windows(self, tokenizer: Tokenizer, length: int) -> list[Window]:
        windows = (self._window(tokenizer, *scene, length) for scene in self._scenes())
        return [window for window, _ in zip(windows, range(self._count), strict=False)]

    def _scenes(self) -> Iterator[tuple[str, str, str]]:
        rng = random.Random(1 + self._half)
        passages = guide_passages()
        sections = [block for number, block in enumerate(_blocks()) if number % 2 == self._half]
        while True:
            topic, title, questions = rng.choice(sections)
            key = next((key for key in passages if key[0] == topic and key[1].endswith(title)), None)
            if key is None:
                continue
            others = rng.sample(list(passages.values()), rng.choice([0, 0, 0, 1]))
            found = [*others, passages[key]]
            rng.shuffle(found)
            found.append(larger_model("qwen3:4b"))
            yield system_message(found), rng.choice(questions), passages[key].text.strip("\n")

    def _window(self, tokenizer: Tokenizer, system: str, question: str, answer: str, length: int) -> Window:
        before = [SYSTEM, *_tokens(tokenizer, system), END, USER, *_tokens(tokenizer, question), END, ASSISTANT]
        tokens = [*before, *_tokens(tokenizer, answer), END][:length]
        return Window(tokens, min(len(before), len(tokens) - 1))


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=False, bos=False)


def _blocks() -> Iterator[tuple[str, str, list[str]]]:
    """Yield topic, title and questions of each section that has questions."""
    for page in sorted(QUESTIONS.glob("*.txt")):
        for block in re.split(r"\n\s*\n", page.read_text(encoding="utf-8").strip()):
            lines = block.splitlines()
            yield page.stem, lines[0][3:].strip(), [line[3:] for line in lines if line.startswith("Q: ")]


def guide_half(half: int) -> str:
    """Return every other page of the guide."""
    return "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md"))[half::2])


class Judge:
    """The divergence of files from the reference, as llama.cpp runs them, on the half that calibrated nothing."""

    def __init__(self, reference: Path, scenes: int) -> None:
        self._cuts: list[Cut] = [Scenes(scenes, JUDGEMENT), TextCut(guide_half(JUDGEMENT), 1024)]
        self._reference = [[logits.copy() for logits, _ in part] for part in self._run(reference)]

    def divergences(self, file: Path) -> list[float]:
        """Return the mean divergences on scenes and on plain text."""
        means = []
        for part, reference in zip(self._run(file), self._reference, strict=True):
            rows = [score(logits, targets, other) for (logits, targets), other in zip(part, reference, strict=True)]
            means.append(float(np.concatenate([scores.divergence for scores in rows]).mean()))
        return means

    def _run(self, file: Path) -> Iterator[Iterator[tuple[Logits, NDArray[np.int64]]]]:
        side = EvalSide(file, "f16")
        with load_llama_evaluation(side, None, window=CONTEXT, threads=1, repack=True) as evaluation:
            for cut in self._cuts:
                windows = cut.windows(evaluation.tokenizer, evaluation.window)
                executor = evaluation.model.executor
                yield (pair for window in windows for pair in window_logits(executor, window))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--importance", type=Path, help="importance data of the matrices, as numpy's npz")
    parser.add_argument("--text", action="store_true", help="calibrate on plain text")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="llama.cpp's types whose sizes are the budgets")
    parser.add_argument("--probes", type=int, default=2)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--scenes", type=int, default=6, help="that calibrate; twice as many and more judge")
    options = parser.parse_args()
    importance: Importance | None = dict(np.load(options.importance)) if options.importance else None
    cut = TextCut(guide_half(CALIBRATION), 2048) if options.text else Scenes(options.scenes, CALIBRATION)
    effort = Effort(num_tokens=2048, max_groups=options.groups, num_probes=options.probes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, file = folder / "source.gguf", folder / "quantized.gguf"
        with open_gguf(STARTER) as gguf:
            QUANTIZER.write(gguf, source, Recipe("F32"), None)
        judge = Judge(source, 2 * options.scenes + 4)
        print(f"{'':18} {'bytes':>9} {'KL scenes':>10} {'KL text':>9} {'predicted':>10} {'measured':>10}")
        for size in options.sizes:
            with open_gguf(source) as gguf:
                QUANTIZER.write(gguf, file, Recipe(size), importance)
            scenes, text = judge.divergences(file)
            print(f"{size:18} {file.stat().st_size:9} {scenes:10.5f} {text:9.4f}", flush=True)
            recipe, report = choose_types(
                source,
                file.stat().st_size,
                "",
                importance,
                quantizer=QUANTIZER,
                cache=folder / "cache",
                scratch=folder,
                cut=cut,
                effort=effort,
                threads=1,
            )
            with open_gguf(source) as gguf:
                QUANTIZER.write(gguf, file, recipe, importance)
            assert file.stat().st_size == report.nbytes
            scenes, text = judge.divergences(file)
            kinds = ", ".join(
                f"{count} {kind}" for kind, count in Counter(row.type for row in report.rows).most_common()
            )
            figures = f"{report.nbytes:9} {scenes:10.5f} {text:9.4f} {report.predicted:10.5f} {report.measured:10.5f}"
            print(f"{'  auto':18} {figures}  {kinds}", flush=True)


if __name__ == "__main__":
    main()
