"""Measures whether memory grows under mixed load: a line a minute, and the slope of the engine's after warm-up.

    python -m tests.bench.bench_memory --minutes 60            (SmolLM2-135M; Linux)
    python -m tests.bench.bench_memory MODEL.gguf --minutes 5

The requests are those of tests/server/test_soak_memory.py: all new, three at a time. Anonymous memory only: weights are
mapped from a file. Owns the table. Knows nothing of why memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tests.real_models import real_model
from tests.server.harness import Front, num_open_files, serving
from tests.server.test_soak_memory import CLIENTS, KINDS, LIMIT_S, Client

SMALL_CACHES = {"EDGELM_PREFIX_CACHE_RAM": "0.05", "EDGELM_PREFIX_CACHE_DISK": "0.05"}  # GB, so that they are full soon


class OfModel(Client):
    """Sends the requests to a model of any name."""

    model = ""

    def body(self, kind: str) -> tuple[str, dict[str, Any]]:
        path, body = super().body(kind)
        return path, body | {"model": self.model}


def anonymous_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def workers_mb(pid: int) -> float:
    """Return the memory of a process's children and theirs."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return sum(anonymous_mb(child) + workers_mb(child) for child in children)


async def load(front: Front, minutes: float) -> list[tuple[float, float]]:
    """Send requests for so long; print a line a minute, and return minutes and MB of the engine."""
    pid, began = front.ps()["models"][0]["pid"], time.monotonic()
    outcomes, rows, rng = Counter[str](), list[tuple[float, float]](), random.Random(1)

    async def client(http: httpx2.AsyncClient) -> None:
        while time.monotonic() < began + 60 * minutes:
            try:
                await OfModel(http, random.Random(rng.random()), outcomes).send(rng.choice(KINDS))
            except (AssertionError, httpx2.HTTPError):  # a machine that stands still refuses late bodies
                outcomes["failed"] += 1

    async def watch() -> None:
        print("minute requests  front MB  engine MB  engine's workers MB  engine's files", flush=True)
        while True:
            row = (time.monotonic() - began) / 60, anonymous_mb(pid)
            rows.append(row)
            front_mb, of_workers = anonymous_mb(front.process.pid), workers_mb(pid)
            files = num_open_files(pid)
            print(
                f"{row[0]:6.1f} {outcomes.total():8,} {front_mb:9.1f} {row[1]:10.1f} {of_workers:20.1f} {files:15}",
                flush=True,
            )
            await asyncio.sleep(60 - (time.monotonic() - began) % 60)

    async with httpx2.AsyncClient(base_url=front.address, timeout=LIMIT_S * 5, trust_env=False) as http:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
        watching.cancel()
    print(f"{outcomes.total():,} requests: {dict(sorted(outcomes.items()))}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--warm", type=float, default=15, help="minutes that are not in the slope")
    args = parser.parse_args()
    model = args.model or real_model("smollm2")
    with tempfile.TemporaryDirectory(prefix="edgelm-memory-", ignore_cleanup_errors=True) as folder:
        places = {f"EDGELM_{kind}_DIR": f"{folder}/{kind.lower()}" for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")}
        environment = os.environ | places | SMALL_CACHES | {"HF_HOME": f"{folder}/hf", "EDGELM_SPEC": "auto"}
        with serving(environment, model, "--threads", "1", "--ctx", "4096", log=Path(folder, "log")) as front:
            OfModel.model = front.http.get("/v1/models").json()["data"][0]["id"]
            assert front.chat(OfModel.model, max_tokens=1).status_code == 200
            rows = asyncio.run(load(front, args.minutes))
    after = [row for row in rows if row[0] >= args.warm]
    if len(after) > 2:
        slope = float(np.polyfit(*zip(*after, strict=True), 1)[0])
        print(f"engine after {args.warm:g} minutes: {slope:+.2f} MB a minute")


if __name__ == "__main__":
    main()
