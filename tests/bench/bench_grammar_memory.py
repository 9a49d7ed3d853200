"""Measures the memory of grammars that are all new: what is in use, and the gaps that malloc keeps. Linux with glibc.

    python -m tests.bench.bench_grammar_memory --count 5120       (SmolLM2's vocabulary; half a minute)

Each schema is compiled and walked through as an engine does it. Knows nothing of servers.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
from collections import Counter
from typing import Any

import numpy as np

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.engine.sampling.grammar import GrammarCompiler
from tests.bench.bench_memory import anonymous_mb
from tests.real_models import real_model
from tests.server.test_soak_memory import Client

MB = 1e6


class MallInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


async def measure(count: int, every: int) -> None:
    tokenizer = LlamaTokenizer.from_file(real_model("smollm2"))
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens)
    none: Any = None
    rng = random.Random(1)
    client = Client(none, rng, Counter())
    mallinfo: Any = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo

    async def one() -> None:
        spec = GrammarSpec("json_schema", json.dumps(client.schema()), strict=True)
        matcher, length = (await compiler.compile(spec)).matcher(), rng.randrange(4, 40)

        def walk() -> None:
            row = np.zeros((1, (tokenizer.num_tokens + 31) // 32), np.int32)
            for _ in range(length):
                matcher.fill([], row)
                ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                if matcher.done or not ids.size:
                    return
                matcher.accept(int(rng.choice(ids[:50])))

        await asyncio.to_thread(walk)

    print("schemas  RssAnon MB  in use MB  gaps MB")
    for number in range(0, count, 2):
        await asyncio.gather(one(), one())
        if (number + 2) % every == 0:
            info = mallinfo()
            used, gaps = info.uordblks / MB, info.fordblks / MB
            print(f"{number + 2:7,} {anonymous_mb(os.getpid()):11.1f} {used:10.1f} {gaps:8.1f}", flush=True)
    await compiler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5120)
    args = parser.parse_args()
    asyncio.run(measure(args.count, 512))


if __name__ == "__main__":
    main()
