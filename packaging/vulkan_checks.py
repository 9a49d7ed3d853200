"""The checks of vulkan_check.py, which runs this file where llama.cpp has the device Vulkan0. Prints a table.

A check returns its details, or raises AssertionError. The processor's results come from the same library.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from dist_check import DECODE, MIN_DIFFERENT
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgelm import __version__
from edgelm.backends.build import build, choose, predict
from edgelm.backends.llama.api import native_log
from edgelm.backends.llama.binding import BUILD, L
from edgelm.backends.llama.devices import llama_devices
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.offload import OffloadedMemory
from edgelm.backends.llama.placement import ON_CPU, Placement, Wish
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.model import open_model
from edgelm.base.config import Settings
from edgelm.base.sampling import SamplingParams
from edgelm.base.workers.messages import EngineJob
from edgelm.checkpoints.summary import ModelFacts
from edgelm.engine.core import Chunk, Load, Op, Save, Sequence, Step
from tests.server.harness import serving
from tests.tiny import write_tiny

STARTER = Path(__file__).resolve().parent.parent / "models" / "starter" / "starter.gguf"
PROMPT = (
    "edgelm runs a language model on your own machine. You chat with it in the terminal, and other programs use it "
    "through an endpoint of this machine that speaks the APIs of OpenAI, Anthropic and Ollama. "
)
NUM_TOKENS = 12
TOLERANCE = 0.02  # of the range of the logits
CONTEXT = 512
SEQUENCES = 2
LIMIT_S = 600  # of a command or a request
QUICK = ("-p", "16", "-n", "2", "-r", "1", "--json")
MIB = 2**20
REPORTED = re.compile(r"Vulkan0 (model|KV|compute) buffer size = +([\d.]+) MiB")


class Runner:
    """A model in one placement."""

    def __init__(self, path: Path, placement: Placement, kv: str = "f16") -> None:
        model = LlamaModel(path, placement=placement)
        lines = native_log.lines
        self._executor = LlamaExecutor(model, options(kv))
        self._tokenizer = LlamaTokenizer.of_model(model.native, model)
        self.place = self._executor.info.device
        self.reported = dict.fromkeys(("model", "KV", "compute"), 0.0)  # MiB on the device, by llama.cpp
        for line in [*lines, *native_log.lines]:
            if match := REPORTED.search(line):
                self.reported[match[1]] += float(match[2])

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False, bos=True)

    def run(self, tokens: list[int], start: int = 0, slot: int = 0, ops: tuple[Op, ...] = ()) -> NDArray[np.float32]:
        """Run tokens and return the logits of the last one."""
        step = Step((Chunk(Sequence(slot, tokens, len(tokens), SamplingParams()), start, tokens, 1, slot),), ops)
        self._executor.forward(step)
        return self._executor.logits(step)[0].copy()

    def save(self, slot: int, key: int) -> None:
        self._executor.forward(Step((), (Save(slot, key),)))

    def follow(self, prompt: list[int], tokens: list[int]) -> NDArray[np.float32]:
        """Return the logits after the prompt, and after each of the tokens."""
        rows = [self.run(prompt)]
        rows += [self.run([token], len(prompt) + index) for index, token in enumerate(tokens)]
        return np.stack(rows)

    def close(self) -> None:
        self._executor.close()


def options(kv: str) -> LlamaOptions:
    return LlamaOptions(context=CONTEXT, kv=kv, max_sequences=SEQUENCES, threads=2)


def facts_of(path: Path) -> ModelFacts:
    with open_model(path) as model:
        return model.facts


def memory_of(path: Path, **settings: object) -> OffloadedMemory:
    wish = Wish.of(Settings(**settings), llama_devices())  # type: ignore[arg-type]
    return OffloadedMemory(facts_of(path), wish, sequences=SEQUENCES)


def write_float32(path: Path, to: Path) -> Path:
    """Write a model with its weights dequantized: of quantized ones the processor rounds the inputs to 8 bits."""
    given = GGUFReader(path)
    writer = GGUFWriter(to, given.fields["general.architecture"].contents())
    for field in given.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            kind = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], kind)
    for tensor in given.tensors:
        data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, data.reshape([int(size) for size in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def same_as_processor(path: Path, exact: Path, kv: str = "f16", **settings: object) -> str:
    """Compare the logits of the tokens that the processor samples greedily, and the tokens of the trained model.

    `exact` is the same model without quantization, for the processor.
    """
    with closing(Runner(exact, ON_CPU, kv)) as cpu:
        prompt = cpu.encode(PROMPT)
        assert len(prompt) >= 32, "the device takes over long prompts of layers that are not its own"
        rows, tokens = [cpu.run(prompt)], []
        while len(tokens) < NUM_TOKENS:
            tokens.append(int(rows[-1].argmax()))
            rows.append(cpu.run([tokens[-1]], len(prompt) + len(tokens) - 1))
    with closing(Runner(path, memory_of(path, **settings).placement(kv, CONTEXT), kv)) as gpu:
        actual = gpu.follow(prompt, tokens)
    expected = np.stack(rows)
    assert "Vulkan0" in gpu.place, gpu.place
    difference, spread = float(np.abs(actual - expected).max()), float(np.ptp(expected))
    assert difference <= TOLERANCE * spread, f"{difference:.3f} of {spread:.1f}"
    equal = sum(int(row.argmax()) == token for row, token in zip(actual, tokens, strict=False))
    if path == STARTER:  # random weights make near ties
        assert equal == NUM_TOKENS
    return f"{gpu.place}; {equal} of {NUM_TOKENS} tokens equal, logits differ by {difference:.4f} of {spread:.1f}"


def snapshot(path: Path, **settings: object) -> str:
    """Save a sequence, restore it into another one, and continue both."""
    with closing(Runner(path, memory_of(path, **settings).placement("f16", CONTEXT))) as gpu:
        prompt = gpu.encode(PROMPT)
        gpu.run(prompt)
        gpu.save(0, 1)
        straight = gpu.run([300], len(prompt))
        restored = gpu.run([300], len(prompt), slot=1, ops=(Load(1, 1),))
        difference = float(np.abs(straight - restored).max())
        assert difference <= TOLERANCE * float(np.ptp(straight)), difference
        return f"{gpu.place}; {len(prompt)} tokens, logits differ by {difference:.4f}"


def sizes(path: Path, kv: str = "f16", **settings: object) -> str:
    """Compare the plan's bytes on the device with those that llama.cpp reports."""
    memory = memory_of(path, **settings)
    (part,) = memory.devices(kv, CONTEXT)
    with closing(Runner(path, memory.placement(kv, CONTEXT), kv)) as gpu:
        true = {name: size * MIB for name, size in gpu.reported.items()}
    text = ", ".join(
        f"{name} {planned / MIB:.1f} for {true[key] / MIB:.1f}"
        for name, key, planned in (
            ("weights", "model", part.weights),
            ("KV", "KV", part.kv),
            ("compute", "compute", part.workspace),
        )
    )
    assert abs(part.weights - true["model"]) <= 0.01 * MIB + 0.01 * part.weights, text
    assert abs(part.kv - true["KV"]) <= 0.01 * MIB, text
    assert true["compute"] <= 1.05 * part.workspace + MIB, text
    assert part.workspace <= 2 * true["compute"] + 8 * MIB, text
    return f"{gpu.place}; MiB planned for true: {text}"


def short_device(folder: Path) -> str:
    """Load a model with a driver that says that it has room, and then refuses what is more than half of it."""
    path = write_tiny(folder / "deep.gguf", layers=8, width=256, ffn=2048, heads=8)
    (part,) = memory_of(path, gpu_layers="all").devices("f16", 2048)
    limit = str((part.weights + part.kv) // 2 + part.workspace)
    short = {"LD_PRELOAD": os.environ["EDGELM_SMALL_DEVICE"], "EDGELM_DEVICE_BYTES": limit}
    refused = edgelm("bench", str(path), *QUICK, "--gpu-layers", "all", **short)
    assert refused.returncode == 1, refused.stdout
    message = refused.stderr.strip().splitlines()[-1]
    assert message.startswith("error: Vulkan0 has no memory for 9 layers"), refused.stderr
    retried = edgelm("bench", str(path), *QUICK, **short)
    place = json.loads(retried.stdout)["device"]
    assert re.match(r"Vulkan0, [1-8] of 9 layers", place), place
    return f"--gpu-layers all: {message!r}; auto: {place}"


def command_line() -> str:
    """Answer with `edgelm run` on both devices."""
    answers = [json.loads(edgelm(*DECODE, "--device", device).stdout) for device in ("cpu", "gpu")]
    tokens, text = answers[0]["token_ids"], answers[0]["text"]
    assert len(set(tokens)) >= MIN_DIFFERENT, text
    assert answers[1]["token_ids"] == tokens, [answer["text"] for answer in answers]
    return repr(text)


def planned() -> str:
    """Ask `edgelm plan` for the bytes on the device."""
    document = json.loads(edgelm("plan", "starter", "--device", "gpu", "--gpu-layers", "4", "--json").stdout)
    (device,) = document["devices"]
    assert (device["name"], device["layers"]) == ("Vulkan0", 4)
    return f"{device['layers']} layers, {device['total_bytes'] / MIB:.1f} MiB of {device['free_bytes'] / MIB:.0f}"


def chosen() -> str:
    """Let --engine and --device be auto: llama.cpp's GPU comes first, and the ways to run it say so."""
    with open_model(STARTER) as model:
        choice = choose(model, Settings())
    assert (choice.engine, choice.device, choice.unused_gpu) == ("llama", "gpu", ""), choice
    return "; ".join(f"{route.name}: {route.reason or 'taken'}" for route in choice.routes)


def promised() -> str:
    """Predict what a front would promise: beside others fewer layers, and the process places as many."""
    settings = Settings(ctx=CONTEXT, spec="off")
    (device,) = llama_devices()
    whole = predict(STARTER, settings)
    most = whole.offloaded_bytes or whole.total_bytes  # a device that is software may share main memory
    less = predict(STARTER, settings, freed_gpu_bytes=most - device.free_bytes)
    if device.shared:
        return "the device's memory is main memory, where its bytes count"
    assert 0 < less.offloaded_bytes < whole.offloaded_bytes, (less, whole)
    job = EngineJob(model=STARTER, settings=settings, gpu_bytes=less.offloaded_bytes)
    loaded = build(job)
    loaded.engine.close()
    assert loaded.footprint is not None
    assert loaded.footprint.offloaded_bytes == less.offloaded_bytes, loaded.footprint
    sizes = [footprint.offloaded_bytes / MIB for footprint in (whole, less)]
    return f"alone {sizes[0]:.1f} MiB; beside others {sizes[1]:.1f}, {loaded.engine.info.device}"


def doctor() -> str:
    """Ask `edgelm doctor` for the devices."""
    findings = {item["topic"]: item["text"] for item in json.loads(edgelm("doctor", "--json").stdout)["findings"]}
    text: str = findings["GPUs of llama.cpp"]
    assert "Vulkan0" in text
    return text


def two_models(folder: Path) -> str:
    """Serve two models, loaded on the device by two requests at once; both answer as the processor does."""
    second = folder / "second.gguf"
    shutil.copyfile(STARTER, second)
    places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    flags = ("--device", "gpu", "--ctx", str(CONTEXT))
    with serving(os.environ | places, STARTER, second, *flags, log=folder / "serve.log") as front:
        front.http.timeout = LIMIT_S
        names = [model["id"] for model in front.http.get("/v1/models").json()["data"]]

        def answer(name: str) -> str:
            reply = front.chat(name, PROMPT, max_tokens=NUM_TOKENS, temperature=0)
            assert reply.status_code == 200, reply.text
            text: str = reply.json()["choices"][0]["message"]["content"]
            return text

        with ThreadPoolExecutor() as pool:
            texts = list(pool.map(answer, names))
        devices = {model["model"]: model["device"] for model in front.ps()["models"]}
    # Of the starter, `run` would read edgelm's guide.
    limits = ("--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--ctx", str(CONTEXT))
    alone = edgelm("run", str(second), PROMPT, *limits, "--device", "cpu")
    assert texts == [alone.stdout.rstrip("\n")] * 2, (texts, alone)
    assert list(devices.values()) == ["Vulkan0"] * 2, devices
    return f"{', '.join(devices)}: {texts[0]!r}"


def edgelm(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgelm", *arguments]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def checks(folder: Path) -> dict[str, Callable[[], str]]:
    # The processor rounds the inputs of quantized matrices to 8 bits, which may send a token to another expert: 2.5 of
    # 26 in the logits, where Vulkan differs by 0.04 from float32 (docs/results/vulkan-wheel-2026-11-22.txt).
    mixture = write_tiny(folder / "mixture.gguf", layers=4, width=128, ffn=256, experts=8, quant="f32")
    wide = write_tiny(folder / "wide-ffn.gguf", layers=2, width=1024, heads=16, head_dim=64, ffn=4096, quant="q8_0")
    exact = write_float32(STARTER, folder / "starter-f32.gguf")
    same, restore, count = same_as_processor, snapshot, sizes
    return {
        "starter, all layers": partial(same, STARTER, exact),
        "starter, 3 layers": partial(same, STARTER, exact, gpu_layers="3"),
        "starter, output only": partial(same, STARTER, exact, gpu_layers="1"),
        "starter, flash attention, int8": partial(same, STARTER, exact, "int8"),
        "starter, attention on CPU": partial(same, STARTER, exact, override_tensor=("attn_=CPU",)),
        "mixture, all layers": partial(same, mixture, mixture, gpu_layers="all"),
        "mixture, --n-cpu-moe 2": partial(same, mixture, mixture, n_cpu_moe="2"),
        "mixture, --n-cpu-moe all": partial(same, mixture, mixture, n_cpu_moe="all"),
        "mixture, only experts on GPU": partial(
            same, mixture, mixture, gpu_layers="0", override_tensor=("_exps=Vulkan0",)
        ),
        "snapshot, all layers": partial(restore, STARTER),
        "snapshot, 3 layers": partial(restore, STARTER, gpu_layers="3"),
        "snapshot, experts on CPU": partial(restore, mixture, n_cpu_moe="all"),
        "sizes, all layers": partial(count, wide, gpu_layers="all"),
        "sizes, 2 layers": partial(count, wide, gpu_layers="2"),
        "sizes, int8": partial(count, wide, "int8", gpu_layers="all"),
        "sizes, experts on CPU": partial(count, mixture, n_cpu_moe="all"),
        "device without memory": partial(short_device, folder),
        "the choice": chosen,
        "promised memory": promised,
        "edgelm plan": planned,
        "edgelm run": command_line,
        "two models at once": partial(two_models, folder),
        "edgelm doctor": doctor,
    }


def main() -> int:
    logging.getLogger("llama.cpp").addHandler(logging.NullHandler())
    print(f"edgelm {__version__} on llama.cpp's GPU side, {datetime.now(UTC):%Y-%m-%dT%H:%MZ}")
    for device in llama_devices(facts_of(STARTER)):
        slow = ", ".join(device.slow_kv) or "none"
        print(f"{device.name}: {device.description}, {device.free_bytes / MIB:.0f} MiB free, slow KV modes: {slow}")
    package = f"{BUILD.package} {BUILD.version}"
    print(f"llama.cpp {L.llama_version().decode()} of {package}, {os.cpu_count()} cores; times include loading twice\n")
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name, check in checks(Path(temporary)).items():
            if not any(part in name for part in sys.argv[1:] or [""]):
                continue
            start = time.perf_counter()
            try:
                state, details = "ok", check()
            except AssertionError as error:
                state, details = "FAILED", str(error)
                failures += 1
            print(f"{name:30} {state:7} {time.perf_counter() - start:6.1f} s  {details}", flush=True)
    print(f"\n{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
