"""`edgelm eval`: measure how well a model predicts a text, and its distance from another quantization or KV cache.

Owns the choice of the reference, and the state from which an interrupted evaluation continues. A worker evaluates.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edgelm.atomic import atomic_json, read_json
from edgelm.checkpoints.config_json import CONFIG
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.config import Config, load_config
from edgelm.errors import ModelError, RequestError
from edgelm.kv_modes import KV_MODES
from edgelm.library.adapters import adapters_identity
from edgelm.library.local import model_config, runnable_model
from edgelm.workers.messages import EvalJob, EvalRestarted, EvalSide, EvalState, Result

PACKAGES = ("llama-cpp-python", "torch", "triton")  # another version of these rounds differently


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
    """Print the perplexity, and the distance from a reference if there is one. Raises EdgeLMError."""
    config = load_config(flags)
    local = runnable_model(model, config)
    settings = model_config(local, config).settings  # also for the reference, so that no more than one thing differs
    side = EvalSide(local.path, "f16" if settings.kv == "auto" else settings.kv)
    reference = _reference(side, against, config)
    text = _find_text(file)
    key = {
        "engine": [_versions(), settings.engine, settings.device, settings.quantize],
        "text": _hash(text),
        "sides": [(part.kv, _identity(part.model)) for part in (side, reference) if part],
        **({"lora": adapters_identity(settings.lora)} if settings.lora else {}),
        "window": window,
        "stride": stride,
    }
    state_file = StateFile(config.places.cache / "eval", key)
    state = None if restart else state_file.load()
    if state and limit is not None and state["windows"] > limit:
        state = None
    if state:
        print(f"note: continuing after window {state['windows']:,}; --restart starts over", file=sys.stderr)
    job = EvalJob(
        model=side.model,
        settings=settings,
        text=text,
        kv=side.kv,
        against=reference,
        window=window,
        stride=stride,
        limit=limit,
        state=state,
    )
    with reader_may_leave(), run_job(job, config.places, verbose) as replies:
        result = _follow(replies, state_file)
        state_file.delete()
        _print(result, as_json)


def _follow(replies: Iterator[Any], file: StateFile) -> dict[str, Any]:
    """Save each state; return the result. After Ctrl-C, print how to continue."""
    done = total = 0
    try:
        for reply in replies:
            if isinstance(reply, EvalState):
                file.save(reply.state)
                done, total = reply.state["windows"], reply.total
            elif isinstance(reply, EvalRestarted):
                print("note: another engine or device computed the first windows; starting over", file=sys.stderr)
            elif isinstance(reply, Result):
                return reply.document
    except KeyboardInterrupt:
        if done:
            print(
                f"note: stopped after window {done:,} of about {total:,}; the same command continues from there",
                file=sys.stderr,
            )
        raise
    raise AssertionError("a worker ends with a result or an error")


def _reference(side: EvalSide, against: list[str], config: Config) -> EvalSide | None:
    """Return the reference: another KV mode, another model, or both. The part that is not named stays the same."""
    if not against:
        return None
    kvs = [word for word in against if word in KV_MODES]
    models = [word for word in against if word not in KV_MODES]
    if len(kvs) > 1 or len(models) > 1:
        raise RequestError("--against names two references", "give one KV mode, one model, or one of each")
    reference = EvalSide(runnable_model(models[0], config).path if models else side.model, kvs[0] if kvs else side.kv)
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
            raise RequestError(f"{file} does not exist", "give the path of a text file")
        if not path.is_file():
            raise RequestError(f"{file} is not a regular file", "give a text file: edgelm reads it more than once")
        if not path.stat().st_size:
            raise RequestError(f"{file} is empty", "give a longer text")
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise RequestError(f"{file} cannot be read: {error}") from None


def _versions() -> list[str]:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return versions


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def _identity(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of each file of a model. Raises ModelError."""
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


STATE_FORMAT = 1  # of the file, and of the meaning of the figures: part of the key
MAX_AGE_S = 30 * 24 * 3600
MAX_STATE_BYTES = 2**28


class StateFile:
    """The file with the state of one evaluation. `key` is all that the figures depend on, as JSON."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        text = json.dumps({"format": STATE_FORMAT, **key}, sort_keys=True)
        self._key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._path = folder / f"{self._key[:32]}.json"
        _delete_old(folder)

    def load(self) -> dict[str, Any] | None:
        """Return the state that was saved last; None: there is no valid one."""
        try:
            document = read_json(self._path, MAX_STATE_BYTES)
            if document["key"] == self._key and document["sha256"] == _checksum(document["state"]):
                state: dict[str, Any] = document["state"]
                return state
        except (KeyError, TypeError):
            pass
        return None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state. If the disk refuses, the evaluation continues without one."""
        atomic_json(self._path, {"key": self._key, "sha256": _checksum(state), "state": state})

    def delete(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _delete_old(folder: Path) -> None:
    """Delete the states that nobody continued."""
    with suppress(OSError):
        for path in [*folder.glob("*.json"), *folder.glob("*.tmp"), *folder.glob("*.part")]:  # .part: of 0.3.1
            if path.stat().st_mtime < time.time() - MAX_AGE_S:
                path.unlink(missing_ok=True)
