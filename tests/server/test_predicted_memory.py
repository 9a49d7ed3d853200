"""The memory that is predicted of an engine, against what its processes take with a full context, on real models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgelm.base.kv_modes import LLAMA_KV
from tests.real_models import real_model
from tests.server.harness import serving

CONTEXT = 512
TOLERANCE = 0.10
LIMIT_S = 400.0
WORDS = "the old house stands on a green hill where small birds sing in summer and rain falls in winter".split()


def taken_bytes(pid: int) -> int:
    """Return the pages of an engine, and the own ones of its workers: other tests share the pages of files."""

    def counters(process: int) -> dict[str, int]:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}

    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return counters(pid)["Rss"] + sum(counters(child)["Pss_Anon"] for child in children)


@pytest.mark.parametrize("kv", LLAMA_KV)
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_predicted_memory_is_what_a_full_context_takes(
    name: str, kv: str, own: dict[str, str], tmp_path: Path
) -> None:
    model = tmp_path / f"{name}.gguf"
    model.symlink_to(real_model(name))
    environment = own | {"EDGELM_KV": kv, "EDGELM_CTX": str(CONTEXT), "EDGELM_PREFIX_CACHE_RAM": "0"}
    environment.pop("OMP_NUM_THREADS", None)
    prompt = " ".join(WORDS[i % len(WORDS)] for i in range(CONTEXT - 50))
    with serving(environment, model, log=tmp_path / "log") as front:
        reply = front.http.post(
            "/v1/completions",
            json={"model": name, "prompt": prompt, "max_tokens": 32},
            headers={"prefer": "wait"},
            timeout=LIMIT_S,
        )
        assert reply.is_success, reply.text
        assert reply.json()["usage"]["total_tokens"] > 0.9 * CONTEXT
        grammar = {"model": name, "prompt": "1", "max_tokens": 1, "response_format": {"type": "json_object"}}
        reply = front.http.post("/v1/completions", json=grammar, headers={"prefer": "wait"}, timeout=LIMIT_S)
        assert reply.is_success, reply.text  # the vocabulary is read for it, or was read before
        engine = front.ps(name)
        taken, predicted = taken_bytes(engine["pid"]), engine["predicted_bytes"]
    print(
        f"{name} {kv}: {predicted / 2**20:.0f} MiB predicted, {taken / 2**20:.0f} taken: {predicted / taken - 1:+.1%}"
    )
    assert predicted == pytest.approx(taken, rel=TOLERANCE)
