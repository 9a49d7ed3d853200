"""`edgelm eval`: how well a model predicts a text, and how far a quantization or a KV cache takes it from another.

Owns what is compared with what, and the going on after an interruption. The engine child does the work.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from edgelm.commands.choice import chosen_model
from edgelm.commands.eval_state import EvalState
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.config import Config, load_config
from edgelm.errors import ModelError, RequestError
from edgelm.weights.folder_config import CONFIG
from edgelm.weights.gguf import open_gguf
from edgelm.weights.safetensors import open_safetensors

COMPUTING = ("llama-cpp-python", "torch", "triton")
KV_NAMES = ("f16", "k8v16", "int8", "k8v4", "fp8", "k6v4")


class Side(NamedTuple):
    """A model file and how it keeps keys and values."""

    path: Path
    kv: str


def eval_model(
    model: str,
    file: str,
    flags: Mapping[str, object],
    against: list[str],
    *,
    window: int | None,
    stride: int | None,
    limit: int | None,
    restart: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Print perplexity, and the distance from a reference if there is one. Raises EdgeLMError."""
    config = load_config(flags)
    settings = config.settings
    side = Side(chosen_model(model, config).path, "f16" if settings.kv == "auto" else settings.kv)
    reference = _reference(side, against, config)
    text = _find_text(file)
    job = {
        "job": "eval",
        "text": str(text),
        "kv": side.kv,
        "against": {"model": str(reference.path), "kv": reference.kv} if reference else None,
        "window": window,
        "stride": stride,
    }
    key = {
        "engine": [_versions(), settings.engine, settings.device, settings.quantize],
        "text": _hash(text),
        "sides": [(each.kv, _identity(each.path)) for each in (side, reference) if each],
        "window": window,
        "stride": stride,
    }
    state = EvalState(config.places.cache / "eval", key)
    known = None if restart else state.load()
    if known and limit is not None and known["windows"] > limit:
        known = None
    if known:
        print(f"note: going on after window {known['windows']:,}; --restart begins anew", file=sys.stderr)
    job |= {"limit": limit, "state": known}
    with reader_may_leave(), run_job(job, side.path, settings, config.places, verbose) as events:
        result = _follow(events, state)
        state.forget()
        _print(result, as_json)


def _follow(events: Iterator[dict[str, Any]], state: EvalState) -> dict[str, Any]:
    """Keep each state that comes; return the result. Ctrl-C is told how to go on."""
    done = total = 0
    try:
        for event in events:
            if event["event"] == "state":
                state.save(event["state"])
                done, total = event["state"]["windows"], event["total"]
            elif event["event"] == "restarted":
                print("note: another engine or device did the first windows, so it begins anew", file=sys.stderr)
            elif event["event"] == "result":
                result: dict[str, Any] = event["result"]
                return result
    except KeyboardInterrupt:
        if done:
            print(
                f"note: stopped after window {done:,} of about {total:,}; the same command goes on there",
                file=sys.stderr,
            )
        raise
    raise AssertionError("an engine child ends with a result or an error")


def _reference(side: Side, against: list[str], config: Config) -> Side | None:
    """Return what is the reference: another KV type, another file, or both; what is not given stays the same."""
    if not against:
        return None
    kvs = [word for word in against if word in KV_NAMES]
    models = [word for word in against if word not in KV_NAMES]
    if len(kvs) > 1 or len(models) > 1:
        raise RequestError("--against names two references", "give one KV type, one model, or one of each")
    reference = Side(chosen_model(models[0], config).path if models else side.path, kvs[0] if kvs else side.kv)
    if reference == side:
        raise RequestError(
            "--against names the model itself with the same KV cache",
            "give another quantization of the model, or choose another --kv",
        )
    return reference


def _find_text(file: str) -> Path:
    try:
        path = Path(file).expanduser()
        if not path.exists():
            raise RequestError(f"{file} is not there", "give the path of a text file")
        if not path.is_file():
            raise RequestError(f"{file} is not a regular file", "give a text file: it is read more than once")
        if not path.stat().st_size:
            raise RequestError(f"{file} is empty", "give a longer text")
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have; RuntimeError: ~ of nobody
        raise RequestError(f"{file} cannot be read: {error}") from None


def _versions() -> list[str]:
    """Return what computes: another build of it rounds differently."""
    found = []
    for package in COMPUTING:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def _identity(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file of a model. Raises ModelError."""
    if path.is_dir():
        with open_safetensors(path) as folder:
            parts = (*folder.paths, folder.folder / CONFIG)
    else:
        with open_gguf(path) as gguf:
            parts = gguf.paths
    try:
        stats = [(str(part), part.stat()) for part in parts]
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}", "download all files of the model") from None
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for row in _rows(result):
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield f"{result['file']}, {result['kv']} cache, {result['engine']} on {result['device']}", "", ""
    yield "perplexity", f"{result['perplexity']:.4f}", f"± {result['stderr']:.4f}"
    yield "tokens scored", f"{result['tokens']:,}", f"in {result['windows']:,} windows of {result['window']:,}"
    if not (against := result["against"]):
        return
    yield "", "", ""
    yield f"against {against['file']}, {against['kv']} cache", "", ""
    yield "its perplexity", f"{against['perplexity']:.4f}", f"± {against['stderr']:.4f}"
    difference = "log_perplexity_difference"
    yield "ln of their ratio", f"{result[difference]:.6f}", f"± {result[difference + '_stderr']:.6f}"
    yield "mean KL divergence", f"{result['mean_kl']:.6f}", f"± {result['mean_kl_stderr']:.6f}"
    yield "99 % of tokens below", f"{result['p99_kl']:.6f}", f"at most {result['max_kl']:.6f}"
    yield "same most likely token", f"{result['top1_agreement']:.3%}", f"± {result['top1_stderr']:.3%}"
