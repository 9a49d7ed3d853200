"""`edgelm eval` on small trained models: every KV mode, and Q8_0 and Q4_0 weights, beside llama.cpp's own tool.

    python -m tests.bench.bench_eval MODELS [--tool llama-perplexity] [--work FOLDER] [--only NAME]

MODELS is the folder with BabyLlama-tok361-{f32,Q8_0,Q4_0}.gguf and stories260K-v3-f32.gguf. No text belongs to them, so
each gets one that its most exact file writes: 150 stories from BOS on, or the sections of the guide, each with the
starter's answer to a question about it; sampled at temperature 1 with seed 7 by a plain loop over llama.cpp. The
missing quantizations are made by llama.cpp. Prints each command, and a table in Markdown. `--tool` (built from the
llama.cpp in llama-cpp-python's source) is run on the same text, windows, KV types and flash attention. FOLDER keeps the
texts.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgelm.backends.llama.binding import L
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.base.workers.messages import Passage
from edgelm.chats.knowledge.guide import question_groups, sections
from edgelm.chats.knowledge.quote import system_message
from edgelm.library.local import find_local
from tests.bare import BareLoop

ROOT = Path(__file__).resolve().parents[2]
SEED = 7
STORIES = 150
MOST_TOKENS = 20_000  # that are scored in one case
TRIES = 8  # on a busy machine the tool may end with code 0 before its logger has written the figures
FTYPES = {"Q8_0": 7, "Q4_0": 2}
Draw = Callable[[list[int], int], list[int]]


@dataclass(frozen=True)
class Case:
    """One line of the table: a model and its KV mode, and the reference."""

    label: str
    path: Path
    kv: str
    text: Path
    window: int
    against: tuple[Path, str] | None


def main() -> None:
    """Make what is missing, evaluate, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("--tool", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgelm-bench-eval")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    arguments = parser.parse_args()
    arguments.work.mkdir(exist_ok=True)
    rows = ["| | KV | perplexity | mean KL | 99 % KL | same top token | ln ratio |", "|---|---|---|---|---|---|---|"]
    for case in cases(arguments.models, arguments.work):
        if not case.label.startswith(arguments.only):
            continue
        result = run_edgelm(case)
        rows.append(row(case, result))
        if arguments.tool and result:
            print(f"    llama-perplexity: {run_tool(arguments.tool, case, arguments.work)}")
    print("\n".join(["", *rows]))


def cases(models: Path, work: Path) -> Iterator[Case]:
    """Yield the lines of the table."""
    baby, small, starter = (
        models / "BabyLlama-tok361-f32.gguf",
        models / "stories260K-v3-f32.gguf",
        find_local("starter").path,
    )
    texts = {
        baby: write(work / "babyllama.txt", stories, baby, 250),
        small: write(work / "stories260k.txt", stories, small, 500),
        starter: write(work / "starter.txt", answers, starter, 150),
    }
    made = {path: {kind: quantized(path, kind, work) for kind in kinds} for path, kinds in (
        (small, ["Q8_0", "Q4_0"]), (starter, ["Q4_0"]),
    )}  # fmt: skip
    made[baby] = {kind: models / f"BabyLlama-tok361-{kind}.gguf" for kind in FTYPES}
    for exact, name, kind, window in ((baby, "BabyLlama", "f32", 256), (small, "stories260K", "f32", 512)):
        yield Case(f"{name} {kind}", exact, "f16", texts[exact], window, None)
        for quantization, path in made[exact].items():
            yield Case(f"{name} {quantization}", path, "f16", texts[exact], window, (exact, "f16"))
        for kv in ("k8v16", "int8", "k8v4"):
            yield Case(f"{name} {kind}", exact, kv, texts[exact], window, (exact, "f16"))
    yield Case("starter Q8_0", starter, "f16", texts[starter], 512, None)
    for kv in ("k8v16", "int8", "k8v4"):
        yield Case("starter Q8_0", starter, kv, texts[starter], 512, (starter, "f16"))
    for kv in ("f16", "k8v16", "int8", "k8v4"):
        yield Case("starter Q4_0", made[starter]["Q4_0"], kv, texts[starter], 512, (starter, "f16"))


# -- texts and models ----------------------------------------------------------------------------------------------


def write(path: Path, make: Callable[[LlamaTokenizer, Draw, int], Iterator[str]], model: Path, most: int) -> Path:
    """Write the text that a model samples, unless it is there, and say what it is."""
    if path.exists():
        return described(path, model)
    with closing(LlamaModel(model)) as native:
        tokenizer = LlamaTokenizer.of_model(native.native, native)
        loop = BareLoop(native.native, 1024, threads=1)
        rng = np.random.default_rng(SEED)

        def draw(prompt: list[int], most: int) -> list[int]:
            loop.clear()
            tokens, fed = [], prompt
            while len(tokens) < most:
                start = len(prompt) + len(tokens) - len(fed)
                loop.decode(fed, start)
                logits = np.ctypeslib.as_array(L.llama_get_logits(loop.context), (loop.num_vocab,)).astype(float)
                shares = np.exp(logits - logits.max()).cumsum()
                token = int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))
                if token in tokenizer.stop_ids:
                    break
                tokens.append(token)
                fed = [token]
            return tokens

        path.write_text("\n\n".join(make(tokenizer, draw, most)) + "\n", encoding="utf-8")
        loop.close()
    return described(path, model)


def described(path: Path, model: Path) -> Path:
    """Print what a text is."""
    data = path.read_bytes()
    print(f"{path.name}: {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}, by {model.name}")
    return path


def stories(tokenizer: LlamaTokenizer, draw: Draw, most: int) -> Iterator[str]:
    """Yield what a model writes from BOS on."""
    assert tokenizer.bos_id is not None
    for _ in range(STORIES):
        yield printable(tokenizer.decode(draw([tokenizer.bos_id], most)).strip())


def answers(tokenizer: LlamaTokenizer, draw: Draw, most: int) -> Iterator[str]:
    """Yield a section of the guide, a question about it, and the answer that the starter gives, for each section."""
    for section in sections():
        question = next(group.questions[0] for group in question_groups(section.topic) if group.title == section.title)
        system = system_message([Passage(section.topic, section.title, section.text)])
        text = f"<|system|>{system}<|end|><|user|>{question}<|end|><|assistant|>"
        prompt = tokenizer.encode(text, special=True, bos=True)
        yield printable(f"{section.text}\n\n{question}\n{tokenizer.decode(draw(prompt, most))}")


def printable(text: str) -> str:
    """Leave out half characters, and the backslashes that llama.cpp's tool would read as escapes."""
    return "".join(char for char in text if (char.isprintable() or char == "\n") and char not in "\\\ufffd")


def quantized(source: Path, kind: str, work: Path) -> Path:
    """Return a quantization of a model, made by llama.cpp."""
    path = work / f"{source.stem}-{kind}.gguf"
    params = L.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FTYPES[kind], True
    assert L.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(params)) == 0
    return path


# -- the two programs ----------------------------------------------------------------------------------------------


def run_edgelm(case: Case) -> dict[str, Any] | None:
    """Run the command; None where it refuses, which is printed."""
    words = ["eval", str(case.path), str(case.text), "--window", str(case.window), "--kv", case.kv]
    words += ["--limit", str(most_windows(case))]
    words += ["--threads", "1"]  # more wait for each other in models so small
    if case.against:
        path, kv = case.against
        words += (["--against", str(path)] if path != case.path else []) + (["--against", kv] if kv != case.kv else [])
    print("\n$ edgelm", *(Path(word).name for word in words), "--json", flush=True)
    command = [sys.executable, "-m", "edgelm", *words, "--restart", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print("   ", (done.stdout or done.stderr).strip(), flush=True)
    result: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return result


def run_tool(tool: Path, case: Case, work: Path) -> str:
    """Return the figures of llama.cpp's tool for the same."""

    def run(path: Path, kv: str, *more: str) -> str:
        mode = LLAMA_KV[kv]
        words = ["-m", str(path), "-f", str(case.text), "-c", str(case.window), "-b", str(case.window), "--no-escape"]
        words += ["-ctk", mode.key_type.lower(), "-ctv", mode.value_type.lower(), "-t", "1", *more]
        words += ["--chunks", str(most_windows(case))]
        words += ["-fa", "on" if mode.flash else "off"]
        for _ in range(TRIES):
            done = subprocess.run([tool, *words], capture_output=True, text=True, check=False)
            if "Final estimate" in done.stderr or "Same top p" in done.stdout:
                break
        return f"{done.stdout}{done.stderr} [exit code {done.returncode}]"

    if not case.against:
        return found(run(case.path, case.kv), r"PPL = ([\d.]+ \+/- [\d.]+)", "perplexity")
    base = str(work / "logits.bin")
    run(*case.against, "--kl-divergence-base", base)
    out = run(case.path, case.kv, "--kl-divergence-base", base, "--kl-divergence")
    return ", ".join(
        found(out, pattern, name)
        for pattern, name in (
            (r"Mean PPL\(Q\) *: *(.*)", "perplexity"),
            (r"Mean ln\(PPL\(Q\)/PPL\(base\)\) *: *(.*)", "ln ratio"),
            (r"Mean +KLD: *(.*)", "mean KL"),
            (r"99.0% +KLD: *(.*)", "99 % KL"),
            (r"Maximum KLD: *(.*)", "max KL"),
            (r"Same top p: *(.*)", "same top"),
        )
    )


def most_windows(case: Case) -> int:
    return MOST_TOKENS // (case.window // 2)


def found(out: str, pattern: str, name: str) -> str:
    """Return one figure of the tool's output with its name."""
    match = re.search(pattern, out)
    return f"{name} {match[1] if match else 'not found in: ' + out[-300:]}"


def row(case: Case, result: dict[str, Any] | None) -> str:
    """Return a line of the table."""
    if result is None:
        return f"| {case.label} | {case.kv} | not possible | | | | |"
    perplexity = f"{result['perplexity']:.4f} ± {result['stderr']:.4f}"
    if not result["against"]:
        return f"| {case.label} | {case.kv} | {perplexity} | | | | |"
    ratio = f"{result['log_perplexity_difference']:+.5f} ± {result['log_perplexity_difference_stderr']:.5f}"
    return (
        f"| {case.label} | {case.kv} | {perplexity} | {result['mean_kl']:.6f} | {result['p99_kl']:.5f} "
        f"| {result['top1_agreement']:.2%} | {ratio} |"
    )


if __name__ == "__main__":
    main()
