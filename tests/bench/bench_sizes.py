"""KL divergence against size on the starter, by one measure: uniform types, types by budget, packed INT4, pruning.

    python -m tests.bench.bench_sizes [--svg FILE]

The starter as F32 is the source. Prompts of the starter with their answers about every other section of the guide
calibrate (importance data, the budget's measurements, AWQ, GPTQ, pruning); those about the others judge: the mean
KL(source || changed) of answer tokens, with weights as the file has them and 32-bit arithmetic. Sizes are those of the
files; pruned matrices count 4 bits for each kept weight, a scale for 64 weights, and one bit for the place of each
weight (2:4: two bits for each kept one).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from math import log10
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from edgelm.backends.llama.model import LlamaModel
from edgelm.checkpoints.gguf import open_gguf
from edgelm.quantization.automatic import choose_types
from edgelm.quantization.chosen_types import NativeQuantizer
from edgelm.quantization.importance import measure
from edgelm.quantization.int4_job import Int4Job
from edgelm.quantization.int4_model import quantize_folder
from edgelm.quantization.recipe import Recipe
from edgelm.text.tokenizer import LlamaTokenizer
from tests.bench.bench_int4 import all_logits
from tests.bench.bench_outliers_pruning import divergence
from tests.bench.bench_quantize_auto import CALIBRATION, CONTEXT, JUDGEMENT, STARTER, Scenes
from tests.bench.plain_llama import PlainLlama
from tests.bench.weight_forms import pruned, two_of_four
from tests.models.starter_folder import write_starter_folder

UNIFORM = ("Q2_K", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_XS", "Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
BUDGETS = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
GROUPS = (32, 64, 128)
JUDGED, CALIBRATING = 24, 12  # prompts
EXACT = 1e-6  # nats: Q8_0 rounds nothing here, since the starter was saved in it, and has no place in logarithms
SERIES = {"uniform": "#1f77b4", "auto": "#d62728", "int4": "#7f7f7f", "int4-awq": "#2ca02c", "int4-gptq": "#9467bd",
          "pruned": "#8c564b"}  # fmt: skip


class Point(NamedTuple):
    """One form of the model."""

    series: str
    label: str
    nbytes: int
    kl: float


class Bench:
    """The source, the prompts that judge, and the source's own predictions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.quantizer = NativeQuantizer(1)
        self.source = folder / "source.gguf"
        with open_gguf(STARTER) as gguf:
            self.quantizer.write(gguf, self.source, Recipe("F32"), None)
        self.model = PlainLlama(self.source)
        self._native = LlamaModel(self.source)
        tokenizer = LlamaTokenizer.of_model(self._native.native, self._native)
        self.judged = Scenes(JUDGED, JUDGEMENT).windows(tokenizer, CONTEXT)
        self.calibrating = Scenes(CALIBRATING, CALIBRATION).windows(tokenizer, CONTEXT)
        self.text = "".join(tokenizer.decode(window.tokens) for window in self.calibrating)
        self.marked = "".join(
            "".join(tokenizer.text_of(token) if tokenizer.piece(token) == b"" else tokenizer.decode([token])
                    for token in window.tokens)
            for window in self.calibrating
        )  # fmt: skip
        self._own = [self.model.log_probs(window.tokens) for window in self.judged]

    def kl(self, changed: dict[str, Tensor]) -> float:
        """Return the divergence of the source with other weights for some names."""
        return self._mean([self.model.log_probs(window.tokens, changed) for window in self.judged])

    def kl_of_folder(self, folder: Path) -> float:
        """Return the divergence of a folder in our engine."""
        rows = [window.tokens for window in self.judged]
        logits = all_logits(folder, rows).log_softmax(-1)
        return self._mean(list(logits.split([len(row) for row in rows])))

    def _mean(self, predictions: list[Tensor]) -> float:
        parts = [
            divergence(own, other)[window.first - 1 : -1]
            for own, other, window in zip(self._own, predictions, self.judged, strict=True)
        ]
        return torch.cat(parts).mean().item()


def quantized(bench: Bench) -> Iterator[Point]:
    """Yield llama.cpp's mixtures with importance data, and types by budget at the sizes of some."""
    weights = measure(bench.source, bench.text, max_tokens=30_000).means()
    path, sizes = bench.folder / "quantized.gguf", {}
    for kind in UNIFORM:
        with open_gguf(bench.source) as gguf:
            bench.quantizer.write(gguf, path, Recipe(kind), weights)
        sizes[kind] = path.stat().st_size
        yield Point("uniform", kind, sizes[kind], bench.kl(PlainLlama(path).weights))
    for kind in BUDGETS:
        recipe, _ = choose_types(
            bench.source,
            sizes[kind],
            "",
            weights,
            quantizer=bench.quantizer,
            cache=bench.folder / "cache",
            scratch=bench.folder,
            cut=Scenes(CALIBRATING, CALIBRATION),
            threads=1,
        )
        with open_gguf(bench.source) as gguf:
            bench.quantizer.write(gguf, path, recipe, weights)
        yield Point("auto", f"as {kind}", path.stat().st_size, bench.kl(PlainLlama(path).weights))


def packed(bench: Bench) -> Iterator[Point]:
    """Yield packed INT4 by rounding, AWQ and GPTQ."""
    source = write_starter_folder(bench.folder / "folder")
    calibration = bench.folder / "calibration.txt"
    calibration.write_text(bench.marked, encoding="utf-8")
    for method in ("int4", "int4-awq", "int4-gptq"):
        for group in GROUPS:
            out = bench.folder / f"{method}-{group}"
            job = Int4Job(
                folder=source, out=out, method=method, group=group, calibration=calibration, sequences=24, device="cpu"
            )
            quantize_folder(job, lambda _: None)
            size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
            yield Point(method, f"g{group}", size, bench.kl_of_folder(out))


def sparse(bench: Bench) -> Iterator[Point]:
    """Yield pruned matrices with 4-bit codes; the rest is as the starter's own file has it."""
    model = bench.model
    model.seen = {}
    for window in bench.calibrating:
        model.log_probs(window.tokens)
    seen, model.seen = model.seen, None
    stored = PlainLlama(STARTER).stored_bytes
    rest = sum(size for name, size in stored.items() if name not in model.matrices())
    forms = {
        "30 %": partial(pruned, 0.3, "activation", 4, 64),
        "50 %": partial(pruned, 0.5, "activation", 4, 64),
        "2:4": partial(two_of_four, "activation", 4, 64),
    }
    for label, form in forms.items():
        made = {name: form(model.weights[name], seen[name]) for name in model.matrices()}
        size = rest + sum(part.bits for part in made.values()) / 8
        yield Point("pruned", label, int(size), bench.kl({name: part.values for name, part in made.items()}))


def svg(points: list[Point]) -> str:
    """Return the plot: size from left to right, divergence upwards, in logarithms."""
    left, top, width, height = 70, 40, 700, 420
    points = [point for point in points if point.kl > EXACT]
    xs = [log10(point.nbytes) for point in points]
    ys = [log10(point.kl) for point in points]
    x0, x1, y0, y1 = min(xs) - 0.02, max(xs) + 0.04, min(ys) - 0.1, max(ys) + 0.1

    def place(nbytes: float, kl: float) -> tuple[float, float]:
        return (left + width * (log10(nbytes) - x0) / (x1 - x0), top + height * (y1 - log10(kl)) / (y1 - y0))

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 540" font-family="sans-serif" font-size="12">',
        '<rect width="800" height="540" fill="white"/>',
        '<text x="70" y="24" font-size="15">The starter: KL divergence from the source against size</text>',
    ]
    for kl in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
        if y0 <= log10(kl) <= y1:
            y = place(points[0].nbytes, kl)[1]
            parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{kl:g}</text>')
    for megabytes in (2.5, 3, 3.5, 4, 4.5, 5, 6):
        if x0 <= log10(megabytes * 1e6) <= x1:
            x = place(megabytes * 1e6, points[0].kl)[0]
            parts.append(f'<line y1="{top}" y2="{top + height}" x1="{x:.1f}" x2="{x:.1f}" stroke="#eee"/>')
            parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{megabytes:g} MB</text>')
    for number, (series, colour) in enumerate(SERIES.items()):
        own = sorted((point for point in points if point.series == series), key=lambda point: point.nbytes)
        line = " ".join("{:.1f},{:.1f}".format(*place(point.nbytes, point.kl)) for point in own)
        if series not in ("pruned", "uniform"):
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for at, point in enumerate(own):
            x, y = place(point.nbytes, point.kl)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            label = point.label if series in ("uniform", "pruned", "int4-gptq") else ""
            y += 16 * (at % 2)  # below every other one
            parts.append(f'<text x="{x + 6:.1f}" y="{y - 4:.1f}" font-size="10" fill="{colour}">{label}</text>')
        parts.append(f'<circle cx="{left + 10 + 115 * number}" cy="522" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18 + 115 * number}" y="526">{series}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Measure, print a table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    points = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        answers = sum(len(window.tokens) - window.first for window in bench.judged)
        print(f"{len(bench.judged)} prompts judge, {answers:,} tokens of answers\n{'':20}{'bytes':>10}{'KL':>10}")
        for part in (sparse, packed, quantized):
            for point in part(bench):
                points.append(point)
                print(f"{point.series + ' ' + point.label:20}{point.nbytes:10,}{point.kl:10.5f}", flush=True)
    if options.svg:
        options.svg.write_text(svg(points), encoding="utf-8")


if __name__ == "__main__":
    main()
