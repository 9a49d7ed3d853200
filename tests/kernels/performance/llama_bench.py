"""llama.cpp's figures for the same steps: its llama-bench, on the same GPU in the same run.

Owns how its program is called and the step that a figure stands for. A verification is a prompt of as many tokens, of
which llama-bench computes only the last one's logits. It runs one sequence, so a batch of sequences has no figure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.kernels.performance.step import Scene

TOKENS = 64  # that it decodes, half of them before the step's depth
LIMIT_S = 120
# Its default build has no CUDA kernel for one token where the types of keys and values differ: it would convert them to
# f16 for each token (older releases compute attention on the CPU).
TYPES = {"f16": "f16", "k8v4": "q8_0"}


def program() -> str | None:
    """Return llama-bench: LLAMA_BENCH, or one on PATH."""
    return os.environ.get("LLAMA_BENCH") or shutil.which("llama-bench")


def arguments_of(scene: Scene, model: Path) -> list[str] | None:
    """Return the arguments for a scene; None: it has no such test."""
    if scene.sequences > 1:
        return None
    kind = TYPES[scene.kv]
    depth = scene.depth if scene.rows > 1 else scene.depth - TOKENS // 2
    test = ["-p", str(scene.rows), "-n", "0"] if scene.rows > 1 else ["-p", "0", "-n", str(TOKENS)]
    cache = ["-fa", "1", "-ctk", kind, "-ctv", kind]
    return ["-m", str(model), "-ngl", "99", *cache, *test, "-d", str(depth), "-r", "5", "-o", "json"]


def milliseconds(output: str, scene: Scene) -> float:
    """Return the time of a step from the tokens a second that llama-bench prints.

    Raises ValueError if it did not compute on CUDA, or printed something else.
    """
    (result,) = json.loads(output)
    if "CUDA" not in result["backends"]:
        raise ValueError(f"it computes on {result['backends'] or 'the CPU'}, not on CUDA")
    return 1e3 * scene.rows / float(result["avg_ts"])


def steps(scenes: Sequence[Scene], model: Path) -> Iterator[tuple[Scene, float | None, str]]:
    """Yield the milliseconds of each step, or why there are none."""
    name = program()
    for scene in scenes:
        arguments = arguments_of(scene, model)
        if name is None or arguments is None:
            yield scene, None, "llama-bench has no such test" if name else "no llama-bench"
            continue
        try:
            done = subprocess.run(
                [name, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=True, errors="replace"
            )
            yield scene, milliseconds(done.stdout, scene), ""
        except subprocess.CalledProcessError as error:
            yield scene, None, f"llama-bench failed: {' '.join(error.stderr.split())[-200:]}"
        except subprocess.TimeoutExpired:
            yield scene, None, f"llama-bench was not done after {LIMIT_S} s"
        except (OSError, LookupError, ValueError) as error:
            yield scene, None, f"llama-bench failed: {error}"
