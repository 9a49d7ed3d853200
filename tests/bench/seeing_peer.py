"""Compares the log-probabilities of models that see with llama-server's, on the same random pairs.

    python -m tests.bench.seeing_peer LLAMA_SERVER [--port 21110]

LLAMA_SERVER is the program; its libraries lie beside it. Pictures have a size that needs no scaling, because releases
scale in different ways; idefics3 always scales, so it gets one of a single colour. Greedy answers
have no byte tokens: llama-server refuses to show half a character.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from edgelm.text.message_forms import picture_part
from tests.seeing import KINDS, Kind, encode_png, png, write_pair
from tests.seeing_model import CONTEXT, asking, seeing

NUM_TOKENS = 12
BYTES = range(259)  # tokens of single bytes, and those before them
SIZES: dict[Kind, tuple[tuple[int, int], ...]] = {
    "gemma3": ((128, 128), (128, 128)),
    "qwen3vl": ((96, 128), (256, 192)),
    "idefics3": ((256, 256), (256, 128)),
}
LIMIT_S = 120.0


def file_of(kind: Kind, size: tuple[int, int]) -> bytes:
    """Return the picture that both get."""
    width, height = size
    return encode_png(np.full((height, width, 3), (200, 60, 90), np.uint8)) if kind == "idefics3" else png(*size)


async def ours(model: Path, data: bytes) -> list[tuple[int, dict[int, float]]]:
    """Return the tokens of our answer, each with the most likely ones."""
    seen = picture_part(f"data:;base64,{base64.b64encode(data).decode()}")
    sampling = {"num_logprobs": 20, "logit_bias": tuple((token, -math.inf) for token in BYTES)}
    async with seeing(model) as one:
        answer = await one.ask(asking("What is this? ", seen, " say it"), max_tokens=NUM_TOKENS, **sampling)
    return list(zip(answer.ids, answer.tops, strict=True))


def theirs(address: str, data: bytes) -> list[tuple[int, dict[int, float]]]:
    """Return the same of llama-server."""
    mark = httpx2.get(f"{address}/props", timeout=LIMIT_S).json()["media_marker"]
    text = f"<|im_start|>user\nWhat is this? {mark} say it<|im_end|>\n<|im_start|>assistant\n"
    prompt = {"prompt_string": text, "multimodal_data": [base64.b64encode(data).decode()]}
    body = {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "n_probs": 20}
    body |= {"cache_prompt": False, "logit_bias": [[token, False] for token in BYTES]}
    answer: dict[str, Any] = httpx2.post(f"{address}/completion", json=body, timeout=LIMIT_S).json()
    rows = answer["completion_probabilities"]
    return [(row["id"], {top["id"]: top["logprob"] for top in row["top_logprobs"]}) for row in rows]


@contextmanager
def serving(program: Path, model: Path, projector: Path, port: int) -> Iterator[str]:
    """Run llama-server on the processor; give its address."""
    command = [program, "-m", model, "--mmproj", projector, "-c", str(CONTEXT), "-np", "1", "--port", str(port)]
    command += ["--host", "127.0.0.1", "-fa", "off", "--device", "none", "--no-mmproj-offload", "--no-warmup"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(program.parent)}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx2.get(f"{address}/health").status_code == 200:
                    break
            except httpx2.TransportError:
                pass
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Print a line for each kind and size."""
    parser = argparse.ArgumentParser(description="Compare pictures with llama-server.")
    parser.add_argument("program", type=Path)
    parser.add_argument("--port", type=int, default=21110)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            model, projector = write_pair(Path(folder, kind), kind)
            with serving(options.program, model, projector, options.port) as address:
                for size in SIZES[kind]:
                    mine, other = asyncio.run(ours(model, file_of(kind, size))), theirs(address, file_of(kind, size))
                    same, worst = 0, 0.0
                    for (token, top), (twin, their_top) in zip(mine, other, strict=True):
                        common = top.keys() & their_top.keys()
                        worst = max(worst, *(abs(top[one] - their_top[one]) for one in common))
                        if token != twin:
                            break
                        same += 1
                    print(f"{kind} {size[0]}x{size[1]}: {same} of {len(mine)} tokens equal, at most {worst:.4f} apart")


if __name__ == "__main__":
    main()
