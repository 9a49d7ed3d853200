"""`edgelm eval`: measure how well a model predicts a text, and its distance from another quantization or KV cache.

Owns the choice of the reference, and the state from which an interrupted evaluation continues. A worker evaluates.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from edgelm.base.config import Config, Settings, load_config
from edgelm.base.errors import ModelError, RequestError, UsageError
from edgelm.base.kv_modes import KV_MODES
from edgelm.base.machine.conditions import Conditions, installed
from edgelm.base.workers.messages import EvalJob, EvalRestarted, EvalSide, EvalState, Result
from edgelm.checkpoints.config_json import CONFIG
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.commands.eval_state import StateFile
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.commands.running import model_or_served
from edgelm.evaluation.kept import KeptModel, KeptResult, KeptResults
from edgelm.library.adapters import adapters_identity
from edgelm.library.hub_cache import link_target
from edgelm.library.local import model_config
from edgelm.library.readers import Contents, read_each
from edgelm.library.scan import LocalModel

ENGINES = ("llama", "torch")
SHA256 = re.compile(r"[0-9a-f]{64}")
PACKAGES = ("llama-cpp-python", "edgelm-llama", "torch", "triton")  # another version of these rounds differently


Where = tuple[str | None, str | None]  # the values of --endpoint and --api-key
HERE: Where = (None, None)


def eval_model(
    model: str, task: Task, flags: Mapping[str, object], against: Sequence[str], where: Where = HERE, *, as_json: bool
) -> None:
    """Print the perplexity, and the distance from a reference if there is one. Raises EdgeLMError."""
    config = load_config(flags)
    if where != HERE or config.remote_model(model):
        from edgelm.commands.endpoints import endpoint_of, require_none  # most models are here
        from edgelm.commands.eval_endpoint import eval_endpoint

        elsewhere = endpoint_of(model, *where, flags, config)
        require_none({"--against": bool(against), "--restart": task.restart}, model)
        with reader_may_leave():
            eval_endpoint(elsewhere, task.text, task.window, task.stride, task.limit, as_json=as_json)
        return
    local = model_or_served(model, config)
    settings = model_config(local, config).settings  # also for the reference, so that no more than one thing differs
    side = side_of(local, settings)
    reference = parse_against(against, config).reference_of(side)
    with reader_may_leave():
        result = evaluate_side(side, reference, settings, task, config)
        _keep(local, [part for part in (side, reference) if part], result, settings, task, config)
        _print(result, as_json)


def require_here(models: Sequence[str], where: Where, flags: Mapping[str, object]) -> None:
    """Raise UsageError where one of several models runs on another server."""
    config = load_config(flags)
    if where != HERE or any(config.remote_model(model) for model in models):
        raise UsageError("a table or a picture of several models is only of models here", "evaluate one alone")


@dataclass(frozen=True, slots=True)
class Task:
    """The text and the rule by which all models of one command are evaluated."""

    text: Path
    _: KW_ONLY
    window: int | None = None
    stride: int | None = None
    limit: int | None = None
    restart: bool = False
    verbose: bool = False

    def key(self, settings: Settings, sides: Sequence[tuple[str, str, object]]) -> dict[str, Any]:
        """Return all that the figures of these sides depend on: (KV mode, engine, identity) of each."""
        return {
            "engine": [library_versions(), settings.engine, settings.device, settings.quantize],
            "text": _hash(self.text),
            "sides": sides,
            **({"lora": adapters_identity(settings.lora)} if settings.lora else {}),
            "window": self.window,
            "stride": self.stride,
            "noise": 1,  # since 0.6: a noise floor, and flash attention on both sides where one needs it
        }

    def content_key(self, settings: Settings, sides: Sequence[EvalSide], identities: Sequence[str]) -> str:
        """Return the key of the result: of the same content at any path."""
        parts = [(side.kv, side.engine, identity) for side, identity in zip(sides, identities, strict=True)]
        document = {**self.key(settings, parts), "limit": self.limit}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Against:
    """The reference as --against names it; a part that is not named is the model's own."""

    model: LocalModel | None = None
    kv: str | None = None
    engine: str = ""

    def reference_of(self, side: EvalSide) -> EvalSide | None:
        """Return the reference of a model; None: --against names none. Raises RequestError for the model itself."""
        if self == Against():
            return None
        model = self.model.path if self.model else side.model
        reference = EvalSide(model, self.kv or side.kv, self.engine)
        if reference == side:
            raise RequestError(
                "--against names the model itself with the same KV cache",
                "give another quantization of the model, or choose another --kv",
            )
        return reference


def side_of(model: LocalModel, settings: Settings) -> EvalSide:
    """Return a model as it is evaluated with its settings: without --kv the cache is the exact one."""
    return EvalSide(model.path, "f16" if settings.kv == "auto" else settings.kv)


def evaluate_side(
    side: EvalSide, reference: EvalSide | None, settings: Settings, task: Task, config: Config
) -> dict[str, Any]:
    """Evaluate a model in a worker, from the state of an interrupted evaluation on. Raises EdgeLMError."""
    sides = [(part.kv, part.engine, file_stamps(part.model)) for part in (side, reference) if part]
    state_file = StateFile(config.places.cache / "eval", task.key(settings, sides))
    state = None if task.restart else state_file.load()
    if state and task.limit is not None and state["windows"] > task.limit:
        state = None
    if state:
        print(f"note: continuing after window {state['windows']:,}; --restart starts over", file=sys.stderr)
    job = EvalJob(
        model=side.model,
        settings=settings,
        text=task.text,
        kv=side.kv,
        against=reference,
        window=task.window,
        stride=task.stride,
        limit=task.limit,
        state=state,
    )
    with run_job(job, config.places, task.verbose) as replies:
        result = _follow(replies, state_file)
    state_file.delete()
    return result


def _keep(
    local: LocalModel, sides: Sequence[EvalSide], result: dict[str, Any], settings: Settings, task: Task, config: Config
) -> None:
    """Keep a result for `edgelm show` and `edgelm pull --dry-run`."""
    contents = list(read_each(Contents(side.model) for side in sides))
    if any("error" in content for content in contents):
        return  # a file was changed or removed in the meantime
    key = task.content_key(settings, sides, [content["identity"] for content in contents])
    keep_result(identified(local, contents[0]), key, task.text.name, result, config)


def keep_result(
    model: KeptModel, key: str, text: str, result: dict[str, Any], config: Config, at: str = ""
) -> KeptResult:
    """Keep a result of a model under its key; without `at` it is of now."""
    at = at or datetime.now(UTC).isoformat(timespec="seconds")
    kept = KeptResult(key=key, at=at, text=text, figures=result)
    KeptResults(config.places.data).keep(replace(model, results=(kept,)))
    return kept


def identified(local: LocalModel, content: Mapping[str, Any]) -> KeptModel:
    """Return the model for which results are kept; `content` is the reader's answer to `Contents`."""
    targets = [link_target(path).name for path in local.files]  # in the hub's cache: the hashes of the files
    blobs = tuple(sorted(name for name in targets if SHA256.fullmatch(name)))
    return KeptModel(identity=content["identity"], name=local.path.name, nbytes=content["bytes"], blobs=blobs)


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


def parse_against(words: Iterable[str], config: Config) -> Against:
    """Return the reference that --against names: a model, a KV mode, an engine. Raises RequestError, ModelError."""
    kvs = [word for word in words if word in KV_MODES]
    engines = [word for word in words if word in ENGINES]
    models = [word for word in words if word not in (*KV_MODES, *ENGINES)]
    if max(len(kvs), len(engines), len(models)) > 1:
        raise RequestError("--against names two references", "give one KV mode, one model, or one of each")
    model = model_or_served(models[0], config) if models else None
    return Against(model, kvs[0] if kvs else None, engines[0] if engines else "")


def find_text(file: str) -> Path:
    """Return the path of a text. Raises RequestError for anything else."""
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


def library_versions() -> list[str]:
    """Return the versions of the packages that compute."""
    return installed(PACKAGES)


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def file_stamps(path: Path) -> list[tuple[str, int, int]]:
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
    console = Console(highlight=False, markup=False)
    for line in _lines(result):
        console.print(line, soft_wrap=True)


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield _side(result)
    yield _line("perplexity", f"{result['perplexity']:.4f}", f"± {result['stderr']:.4f}")
    yield _line("tokens scored", f"{result['tokens']:,}", f"in {result['windows']:,} windows of {result['window']:,}")
    floors = [result["noise_floor"]["mean_kl"]]
    if against := result["against"]:
        yield ""
        yield f"against {_side(against)}"
        yield _line("its perplexity", f"{against['perplexity']:.4f}", f"± {against['stderr']:.4f}")
        ratio, error = (result["log_perplexity_difference" + suffix] for suffix in ("", "_stderr"))
        yield _line("ln of their ratio", f"{ratio:.6f}", f"± {error:.6f}")
        yield _line("mean KL divergence", f"{result['mean_kl']:.6f}", f"± {result['mean_kl_stderr']:.6f}")
        yield _line("99 % of tokens below", f"{result['p99_kl']:.6f}", f"at most {result['max_kl']:.6f}")
        yield _line("same most likely token", f"{result['top1_agreement']:.3%}", f"± {result['top1_stderr']:.3%}")
        floors.append(against["noise_floor"]["mean_kl"])
    yield _line("noise floor", f"{max(floors):.6f}", "mean KL of a model from itself, one token a step")
    if result["distinguishable"] is False:
        yield "not distinguishable: the mean KL divergence is not above twice the noise floor"
    yield ""
    yield str(Conditions(**result["measured"]))


def _line(name: str, figure: str, note: str) -> str:
    return f"{name:<22}  {figure:>10}  {note}"


def _side(side: Mapping[str, Any]) -> str:
    flash = ", flash attention" if side["flash_attention"] else ""
    return f"{side['file']}, {side['kv']} cache{flash}, {side['engine']} on {side['device']}"
