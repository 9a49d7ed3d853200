"""The bare loop of llama.cpp as a process of its own, for bench_door: one JSON request a line, one JSON answer a line.

    python -m tests.bench.door_bare MODEL.gguf THREADS CONTEXT

`{"text": TEXT}` is answered with the number of its tokens; with `"tokens": N` the tokens are decoded, and N more
greedily: the seconds to the first of them, with the tokenizer's, and from the first to the last.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from edgelm.backends.llama.binding import L
from edgelm.backends.llama.model import LlamaModel
from tests.bare import BareLoop

STEP = 512  # tokens of a prompt that are decoded at a time


def tokenize(vocab: Any, text: str) -> list[int]:
    raw = text.encode()
    ids = (ctypes.c_int32 * (len(raw) + 16))()
    count = L.llama_tokenize(vocab, raw, len(raw), ids, len(ids), True, True)
    assert count > 0
    doubled = ids[:2] == [L.llama_vocab_bos(vocab)] * 2  # the template writes it, and llama.cpp adds it
    return ids[doubled:count]


def answer(loop: BareLoop, vocab: Any, request: dict[str, Any]) -> dict[str, float]:
    if "tokens" not in request:
        return {"prompt": len(tokenize(vocab, request["text"]))}
    loop.clear()
    began = time.perf_counter()
    prompt = tokenize(vocab, request["text"])
    token = 0
    for start in range(0, len(prompt), STEP):
        token = loop.decode(prompt[start : start + STEP], start)
    first = time.perf_counter()
    for step in range(request["tokens"] - 1):
        token = loop.decode([token], len(prompt) + step)
    last = time.perf_counter()
    return {"prompt": len(prompt), "tokens": request["tokens"], "first_s": first - began, "decode_s": last - first}


def main() -> None:
    path, threads, context = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = LlamaModel(path)
    vocab = L.llama_model_get_vocab(model.native)
    loop = BareLoop(model.native, context, threads=threads)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(loop, vocab, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
