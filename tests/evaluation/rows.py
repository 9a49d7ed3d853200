"""Judged models made by hand, and kept results with the fields that the commands print."""

from __future__ import annotations

from typing import Any

from edgelm.evaluation.comparison import Row
from edgelm.evaluation.kept import KeptModel, KeptResult, KeptSpeed

REFERENCE = "F32"
TWELVE = (
    ("F32", 23.2, 0.0), ("F16", 11.7, 2e-8), ("Q8_0", 6.3, 3e-4), ("Q6_K", 4.9, 1.2e-3), ("Q5_K_M", 4.3, 4e-3),
    ("Q5_K_S", 4.25, 4.5e-3), ("Q4_K_M", 3.8, 0.011), ("Q4_K_S", 3.7, 0.013), ("Q4_0", 3.69, 0.03),
    ("IQ4_XS", 3.5, 0.012), ("Q3_K_M", 3.3, 0.06), ("Q2_K", 2.7, 0.31),
)  # fmt: skip


def row(label: str, megabytes: float, kl: float, **more: Any) -> Row:
    figures = {
        "perplexity": 5 + kl, "stderr": 0.1, "mean_kl": kl, "mean_kl_stderr": kl / 10, "p99_kl": kl * 9,
        "top1_agreement": 1 - kl, "tokens": 1000, "windows": 4, "kv": "f16", "engine": "llama", "device": "cpu",
    }  # fmt: skip
    more = {"figures": figures, "parameters": 6_000_000, "decode_speed": 100 - megabytes, "prompt_speed": 900.0} | more
    return Row(name=f"m-{label}", label=label, nbytes=int(megabytes * 1e6), is_reference=label == REFERENCE, **more)


def rows(*named: str) -> list[Row]:
    """Return rows of TWELVE: those named, or all."""
    return [row(*values) for values in TWELVE if not named or values[0] in named]


def kept_model(identity: str = "a" * 64, *, blobs: tuple[str, ...] = (), key: str = "k", **figures: Any) -> KeptModel:
    document = {
        "perplexity": 5.125, "mean_kl": 0.0123, "top1_agreement": 0.991, "kv": "f16", "engine": "llama",
        "against": {"file": "m-F16.gguf", "kv": "f16", "engine": "llama"},
    } | figures  # fmt: skip
    result = KeptResult(key=key, at="2026-11-23T10:00:00+00:00", text="wiki.txt", figures=document)
    speed = KeptSpeed(
        key=key,
        at="2026-11-23T10:00:00+00:00",
        engine="llama",
        device="cpu",
        kv="auto",
        prompts=(90.0, 100.0, 500.0),
        decodes=(9.0, 11.0),
    )
    return KeptModel(identity=identity, name="m.gguf", nbytes=7, blobs=blobs, results=(result,), speeds=(speed,))
