"""llama.cpp's own server with its default n-gram speculation against itself without, beside edgelm's engine likewise.

    python -m tests.bench.bench_llama_server MODEL.gguf --server llama-server [--requests 8] [--tokens 96] [--rounds 2]

Each prompt is a run of random words, completed greedily, all prompts again in each round: from the second on, what is
generated was generated before. Prints decoded tokens per second of the four sides, alternating request by request, and
on / off for each program. The weights may be random: then there is nothing to gain in the first round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from edgelm.backends.llama.model import LlamaModel
from edgelm.engine.clock import StepCosts
from edgelm.machine.cpu import usable_cores
from edgelm.speculation.ngram_drafter import NgramDrafter
from edgelm.speculation.past_answers import PastAnswers
from edgelm.text.tokenizer import LlamaTokenizer
from tests.bench.bench_speculation import Request, make_side, measured_surface

FIRST_PORT = 18_650
STARTING_S = 120
WORDS = "the a dog model answer code list of in and to write story table name price number day red blue once".split()


class Server:
    """One llama-server."""

    def __init__(self, program: Path, model: Path, port: int, args: argparse.Namespace, *more: str) -> None:
        options = ["-m", str(model), "--port", str(port), "-c", str(args.context), "-t", str(args.threads), "-np", "1"]
        self._process = subprocess.Popen(
            [str(program), *options, "-fa", "off", "--no-warmup", *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False)
        deadline = time.monotonic() + STARTING_S
        while True:
            try:
                if self._client.get("/health").status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("llama-server does not start")
            time.sleep(0.2)

    def speed(self, prompt: list[int], tokens: int) -> float:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        timings = self._client.post("/completion", json=body).json()["timings"]
        return float(timings["predicted_per_second"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=usable_cores().physical)
    args = parser.parse_args()
    args.kv = "f16"

    model = LlamaModel(args.model)
    tokenizer = LlamaTokenizer.of_model(model.native, model)
    surface = measured_surface(model, args)
    on = make_side(model, args, StepCosts(surface), NgramDrafter(PastAnswers()))
    off = make_side(model, args, None, None)
    servers = {
        "llama-server off": Server(args.server, args.model, FIRST_PORT, args),
        "llama-server on": Server(args.server, args.model, FIRST_PORT + 1, args, "--spec-default"),
    }
    rng = random.Random(1)
    prompts = [
        tokenizer.encode(" ".join(rng.choices(WORDS, k=40)), special=False, bos=True) for _ in range(args.requests)
    ]
    try:
        for number in range(args.rounds):
            speeds: dict[str, list[float]] = {}
            for prompt in prompts:
                request = Request([], prompt, [0] * args.tokens)
                for name, side in (("edgelm off", off), ("edgelm on", on)):
                    seconds = side.run(request, forced=False)
                    speeds.setdefault(name, []).append((args.tokens - 1) / seconds)
                for name, server in servers.items():
                    speeds.setdefault(name, []).append(server.speed(prompt, args.tokens))
            shown = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in speeds.items())
            print(f"{args.model.stem}, round {number + 1}, {len(prompts)} prompts, tokens/s (medians): {shown}")
            for program in ("edgelm", "llama-server"):
                pairs = zip(speeds[f"{program} on"], speeds[f"{program} off"], strict=True)
                ratios = [with_ / without for with_, without in pairs]
                print(f"  {program} on / off: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    finally:
        for server in servers.values():
            server.close()
        on.engine.close()
        off.engine.close()


if __name__ == "__main__":
    sys.exit(main())
