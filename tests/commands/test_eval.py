"""`edgelm eval` as a user sees it: figures, comparisons, an interrupted run that continues, one line for each error."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine import conditions
from edgelm.base.machine.conditions import engine_build
from edgelm.base.machine.cpu import processor_name
from edgelm.base.workers.messages import EvalJob, EvalRestarted, EvalSide, EvalState, Result
from edgelm.base.workers.wire import decode, encode
from edgelm.commands import eval as eval_module
from edgelm.commands.eval import Task, eval_model, find_text
from edgelm.commands.eval_state import MAX_AGE_S, StateFile
from edgelm.commands.job import REPLIES
from edgelm.engine.core import ExecutorInfo, Step
from edgelm.evaluation.evaluate import Evaluation, LoadedSide
from edgelm.jobs import evaluate as job_module
from edgelm.jobs.evaluate import evaluate_file
from tests.commands.test_run import TIMEOUT_S, Edgelm, children_of, error_of, gone
from tests.tiny import write_tiny

TEXT = "Once upon a time there was a little girl. She said hello to the big dog and her friend.\n"
FIELDS = {
    "model", "file", "kv", "tokens", "perplexity", "stderr", "nats_per_token", "mean_kl", "mean_kl_stderr", "p99_kl",
    "max_kl", "top1_agreement", "top1_stderr", "log_perplexity_difference", "log_perplexity_difference_stderr",
    "against", "windows", "window", "stride", "engine", "device", "flash_attention", "noise_floor", "distinguishable",
    "measured",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model in two quantizations, and another model."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "f32.gguf", context=512)
    write_tiny(folder / "q8_0.gguf", context=512, quant="q8_0")
    write_tiny(folder / "other.gguf", context=512, seed=1)
    write_tiny(folder / "slow.gguf", layers=12, width=256, ffn=1024)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT * 60)
    return path


@pytest.fixture(scope="module")
def long_text(text: Path) -> Path:
    path = text.with_name("long.txt")
    path.write_text(TEXT * 20_000)
    return path


def evaluate(edgelm: Edgelm, *arguments: str | Path) -> dict[str, Any]:
    done = edgelm("eval", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_models_own_settings_hold_and_flags_beat_them(edgelm: Edgelm, models: Path, text: Path) -> None:
    config = Path(edgelm.environment["EDGELM_CONFIG_DIR"])
    config.mkdir(exist_ok=True)
    (config / "config.toml").write_text("kv = 'int8'\n[models.\"f32\"]\nkv = 'k8v4'\n")
    assert evaluate(edgelm, models / "f32.gguf", text, "--limit", "1")["kv"] == "k8v4"
    assert evaluate(edgelm, models / "f32.gguf", text, "--limit", "1", "--kv", "f16")["kv"] == "f16"


class FakeChild:
    """Keeps the replies of a job as its parent would receive them."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def send(self, reply: object) -> None:
        self.replies.append(decode(encode(reply), REPLIES))

    def fail(self, error: EdgeLMError) -> NoReturn:
        """Fail: nothing hangs here."""
        raise error

    def states(self) -> list[dict[str, Any]]:
        return [reply.state for reply in self.replies if isinstance(reply, EvalState)]


def job_result(model: Path, text: Path, child: FakeChild | None = None, **options: Any) -> dict[str, Any]:
    """Do the worker's job in this process; the job and its replies pass through the protocol."""
    job = EvalJob(**{"model": model, "text": text, "kv": "f16", "settings": Settings(threads=1)} | options)
    child = child or FakeChild()
    evaluate_file(decode(encode(job), [EvalJob]), child)
    result = child.replies[-1]
    assert isinstance(result, Result)
    return without_load(result.document)


def without_load(document: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the load by other processes, which differs from run to run."""
    return document | {"measured": document["measured"] | {"others": None}}


def test_json_is_one_document_with_all_fields(edgelm: Edgelm, models: Path, text: Path) -> None:
    result = evaluate(edgelm, models / "f32.gguf", text)
    assert set(result) == FIELDS
    assert result["kv"] == "f16"
    assert result["file"] == "f32.gguf"
    assert (result["engine"], result["device"]) == ("llama", "cpu")
    assert result["against"] is result["mean_kl"] is result["p99_kl"] is result["top1_agreement"] is None
    assert (result["window"], result["stride"]) == (512, None)
    assert result["tokens"] == 255 * result["windows"] > 0
    assert result["perplexity"] == pytest.approx(math.exp(result["nats_per_token"]))
    assert 0 < result["stderr"] < result["perplexity"]
    assert result["noise_floor"]["tokens"] > 100
    assert result["distinguishable"] is None  # there is nothing to distinguish it from
    assert result["measured"]["build"] == engine_build("llama")
    assert not list((Path(edgelm.environment["EDGELM_CACHE_DIR"]) / "eval").glob("*"))  # no state is left


def test_a_stride_scores_every_token(models: Path, text: Path) -> None:
    first, second = (job_result(models / "f32.gguf", text, window=64, stride=stride) for stride in (16, 63))
    tokenizer = LlamaTokenizer.from_file(models / "f32.gguf")
    assert (
        first["tokens"] == second["tokens"] == len(tokenizer.encode(text.read_text(), special=False, bos=False)) > 1000
    )
    assert first["windows"] > second["windows"]
    assert first["perplexity"] != second["perplexity"]


def test_a_job_continues_from_any_of_its_states(models: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "STATE_EVERY_S", 0)
    child, against = FakeChild(), EvalSide(models / "q8_0.gguf", "f16")
    whole = job_result(models / "f32.gguf", text, child, against=against, window=128)
    states = child.states()
    assert [state["windows"] for state in states] == list(range(1, whole["windows"] + 1))
    for state in (states[0], states[len(states) // 2], states[-1]):
        assert job_result(models / "f32.gguf", text, against=against, window=128, state=state) == whole


@pytest.mark.parametrize("kv", ["k8v16", "int8", "k8v4"])
def test_another_cache_is_compared(models: Path, text: Path, kv: str) -> None:
    model = models / "f32.gguf"
    result = job_result(model, text, kv=kv, against=EvalSide(model, "f16"), window=128)
    assert result["kv"] == kv
    assert result["against"]["kv"] == "f16"
    assert result["against"]["file"] == "f32.gguf"
    assert 0 < result["mean_kl"] < result["p99_kl"] <= 1.001 * result["max_kl"]
    assert result["mean_kl"] < 1
    assert 0.7 < result["top1_agreement"] <= 1
    assert result["log_perplexity_difference"] == pytest.approx(
        math.log(result["perplexity"] / result["against"]["perplexity"]), abs=1e-9
    )


def test_the_reference_may_run_on_the_other_engine(models: Path, text: Path) -> None:
    model = models / "f32.gguf"
    result = job_result(model, text, against=EvalSide(model, "f16", "torch"), window=64, limit=2)
    assert (result["engine"], result["against"]["engine"]) == ("llama", "torch")
    assert 0 < result["mean_kl"] < 0.001
    assert result["top1_agreement"] > 0.97
    own = {"settings": Settings(threads=1, engine="torch", device="cpu")}
    result = job_result(model, text, against=EvalSide(models / "q8_0.gguf", "f16", "llama"), window=64, limit=2, **own)
    assert (result["engine"], result["against"]["engine"]) == ("torch", "llama")
    assert "names the engine that the model has" in job_error(model, text, against=EvalSide(model, "f16", "llama"))
    other = EvalSide(models / "other.gguf", "f16", "torch")
    assert "other.gguf has another vocabulary than f32.gguf" in job_error(model, text, against=other)


def test_a_copy_is_not_distinguishable_and_other_weights_are(edgelm: Edgelm, models: Path, text: Path) -> None:
    copy = models / "copy.gguf"
    copy.write_bytes((models / "q8_0.gguf").read_bytes())
    same = job_result(copy, text, against=EvalSide(models / "q8_0.gguf", "f16"), window=128)
    assert (same["mean_kl"], same["distinguishable"]) == (0.0, False)
    assert same["noise_floor"] == same["against"]["noise_floor"]
    other = job_result(copy, text, against=EvalSide(models / "f32.gguf", "f16"), window=128)
    assert other["distinguishable"] is True
    assert other["mean_kl"] > 2 * max(other["noise_floor"]["mean_kl"], other["against"]["noise_floor"]["mean_kl"])
    done = edgelm("eval", copy, text, "--against", models / "q8_0.gguf", "--limit", "1")
    assert "not distinguishable: the mean KL divergence is not above twice the noise floor" in done.stdout.decode()


@pytest.mark.parametrize(("error", "expected"), [(0.5, False), (0.1, True)])
def test_a_difference_counts_only_above_the_noise_of_either_side(
    models: Path, text: Path, monkeypatch: pytest.MonkeyPatch, error: float, expected: bool
) -> None:
    """The two sides differ alike in both cases; in one the reference differs as much from itself."""
    tokenizer = LlamaTokenizer.from_file(models / "f32.gguf")
    sides = [
        LoadedSide("m", Shifted(tokenizer.num_tokens, 0.4)),
        LoadedSide("m", Shifted(tokenizer.num_tokens, 0, error)),
    ]
    evaluation = Evaluation(sides[0], sides[1], tokenizer, 64, ExitStack())
    monkeypatch.setattr(job_module, "load_evaluation", lambda *_, **__: evaluation)
    result = job_result(models / "f32.gguf", text, against=EvalSide(models / "q8_0.gguf", "f16"), window=64)
    assert result["noise_floor"]["mean_kl"] == 0  # equal to the bit
    assert result["mean_kl"] > 0
    assert result["distinguishable"] is expected


class Shifted:
    """An executor whose first token is likelier by `shift`, and by `error` more where a step has one token."""

    def __init__(self, num_vocab: int, shift: float, error: float = 0.0) -> None:
        self._shift = shift
        self._error = error
        self.info = ExecutorInfo(
            engine="llama", device="cpu", num_vocab=num_vocab, context=64, capacity=64, max_tokens=64, max_rows=64,
            max_sequences=1, kv_bytes_per_token=1,
        )  # fmt: skip

    def forward(self, step: Step) -> None:
        pass

    def logits(self, step: Step) -> np.ndarray:
        rows = np.zeros((step.num_rows, self.info.num_vocab), np.float32)
        rows[:, 0] = 5 + self._shift + (self._error if step.num_tokens == 1 else 0)
        return rows


def test_weights_are_compared_and_the_cache_stays_or_both_change(edgelm: Edgelm, models: Path, text: Path) -> None:
    arguments = (models / "q8_0.gguf", text, "--window", "128", "--kv", "int8", "--against", models / "f32.gguf")
    weights = evaluate(edgelm, *arguments)
    assert (weights["against"]["file"], weights["against"]["kv"]) == ("f32.gguf", "int8")
    both = evaluate(edgelm, *arguments, "--against", "f16")
    assert (both["against"]["file"], both["against"]["kv"]) == ("f32.gguf", "f16")
    assert both["mean_kl"] != weights["mean_kl"]
    assert both["against"]["perplexity"] != weights["against"]["perplexity"]
    assert both["perplexity"] == weights["perplexity"]  # of the model alone


def test_the_output_is_a_table(edgelm: Edgelm, models: Path, text: Path) -> None:
    done = edgelm("eval", models / "q8_0.gguf", text, "--against", models / "f32.gguf", "--limit", "1")
    assert done.returncode == 0
    assert done.stderr == b""
    shown = done.stdout.decode()
    assert f"{engine_build('llama')}, on {processor_name()} with" in shown.splitlines()[-1]
    assert "noise floor " in shown
    assert "not distinguishable" not in shown
    assert "q8_0.gguf, f16 cache" in shown
    assert "against f32.gguf, f16 cache" in shown
    for word in ("perplexity", "in 1 windows of 512", "mean KL divergence", "99 % of tokens", "same most likely token"):
        assert word in shown


def test_a_cache_that_only_another_engine_has_is_refused_with_the_reason(models: Path, text: Path) -> None:
    expected = "is not among the KV caches of llama.cpp (f16, k8v16, int8, k8v4)"
    model = models / "f32.gguf"
    assert f"k6v4 {expected}" in job_error(model, text, kv="k6v4")
    assert f"fp8 {expected}" in job_error(model, text, against=EvalSide(model, "fp8"))


# -- interruptions -------------------------------------------------------------------------------------------------


def windows_of(edgelm: Edgelm) -> int:
    """Return the number of windows that an interrupted evaluation has done."""
    files = list((Path(edgelm.environment["EDGELM_CACHE_DIR"]) / "eval").glob("*.json"))
    return json.loads(files[0].read_bytes())["state"]["windows"] if files else 0


def interrupt(edgelm: Edgelm, how: str, *arguments: str | Path) -> tuple[int, bytes]:
    """Start an evaluation, interrupt it when it has done more windows; return its exit code and standard error."""
    before = windows_of(edgelm)
    with edgelm.start("eval", *arguments) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while windows_of(edgelm) <= before:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (child,) = children_of(process.pid)
        if how == "engine killed":
            os.kill(child, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
        out, errors = process.communicate(timeout=TIMEOUT_S)
        assert out == b""
        assert gone(child)
        return process.returncode, errors


def test_an_interrupted_run_continues_with_the_same_figures(edgelm: Edgelm, models: Path, long_text: Path) -> None:
    arguments = (models / "slow.gguf", long_text, "--window", "64", "--kv", "int8", "--against", "f16")
    stopped = rb"note: stopped after window [\d,]+ of about [\d,]+; the same command continues from there\n"
    code, errors = interrupt(edgelm, "ctrl-c", *arguments)
    assert code == 130
    assert re.fullmatch(stopped, errors)
    continuing = b"note: continuing after window %s; --restart starts over\n"
    for how, last in {"engine killed": rb"error: [^\n]*SIGKILL[^\n]*\n", "command killed": b""}.items():
        begin = continuing % f"{windows_of(edgelm):,}".encode()
        code, errors = interrupt(edgelm, how, *arguments)
        assert code == (1 if how == "engine killed" else -signal.SIGKILL)
        assert re.fullmatch(re.escape(begin) + last, errors)
    windows = windows_of(edgelm)
    limit = ("--limit", str(windows + 3), "--json")
    resumed = edgelm("eval", *arguments, *limit)
    assert resumed.returncode == 0
    assert resumed.stderr == continuing % f"{windows:,}".encode()
    assert windows_of(edgelm) == 0
    whole = edgelm("eval", *arguments, *limit)
    assert whole.stderr == b""
    assert without_load(json.loads(resumed.stdout)) == without_load(json.loads(whole.stdout))


def test_the_state_of_another_engine_is_not_continued(
    models: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command may choose another engine later: a GPU is busy, or gone."""
    monkeypatch.setattr(job_module, "STATE_EVERY_S", 0)
    first = FakeChild()
    whole = job_result(models / "f32.gguf", text, first, window=128)
    state = first.states()[0]
    assert state["maker"] == "llama on cpu"
    for maker, expected in {"llama on cpu": 0, "torch on GPU X": 1}.items():
        child = FakeChild()
        assert job_result(models / "f32.gguf", text, child, window=128, state=state | {"maker": maker}) == whole
        assert sum(isinstance(reply, EvalRestarted) for reply in child.replies) == expected


class Command:
    """The command with a fake worker, which reports a state and then is interrupted or has a result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.ends = True
        self.job: EvalJob | None = None
        monkeypatch.setattr(eval_module, "run_job", self.run_job)
        monkeypatch.setattr(eval_module, "_print", lambda *_: None)
        monkeypatch.setattr(eval_module, "_keep", lambda *_: None)
        monkeypatch.setenv("EDGELM_CACHE_DIR", str(folder))
        monkeypatch.setenv("EDGELM_CONFIG_DIR", str(folder))
        monkeypatch.setenv("EDGELM_DATA_DIR", str(folder))

    @contextmanager
    def run_job(self, job: EvalJob, *_: object) -> Iterator[Iterator[Any]]:
        self.job = job
        yield self.replies()

    def replies(self) -> Iterator[Any]:
        yield EvalState({"windows": 7}, 20)
        if not self.ends:
            raise KeyboardInterrupt
        yield Result({})

    def __call__(self, model: Path, text: Path, *against: str | Path, **options: Any) -> int:
        """Run the command; return the number of windows that its job skips."""
        flags = {"kv": options.pop("kv", None)}
        eval_model(str(model), Task(find_text(str(text)), **options), flags, list(map(str, against)), as_json=True)
        assert self.job
        return self.job.state["windows"] if self.job.state else 0


def test_only_the_same_evaluation_continues(
    monkeypatch: pytest.MonkeyPatch, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, tmp_path)
    text, model, other = tmp_path / "a.txt", tmp_path / "m.gguf", models / "q8_0.gguf"
    text.write_text(TEXT)
    model.write_bytes((models / "f32.gguf").read_bytes())
    command.ends = False
    with pytest.raises(KeyboardInterrupt):
        command(model, text)
    assert "stopped after window 7 of about 20" in capsys.readouterr().err
    command.ends = True
    for changed in ({"window": 64}, {"stride": 64}, {"kv": "int8"}, {"limit": 6}):
        assert command(model, text, **changed) == 0
        command.ends = False
        with pytest.raises(KeyboardInterrupt):  # `limit` deleted it
            command(model, text)
        command.ends = True
    for against in ([other], ["int8"], [other, "int8"]):
        assert command(model, text, *against) == 0
    for touched in (text, model):
        whole = touched.read_bytes()
        touched.write_bytes(whole + b" ")
        assert command(model, text) == 0
        touched.write_bytes(whole)
        os.utime(model, ns=(0, 0))
        command.ends = False
        with pytest.raises(KeyboardInterrupt):
            command(model, text)
        command.ends = True
    assert command(model, text, restart=True) == 0
    command.ends = False
    with pytest.raises(KeyboardInterrupt):
        command(model, text)
    for package in ("llama-cpp-python", "torch", "triton"):
        with monkeypatch.context() as another:
            another.setattr(conditions, "version", lambda name, package=package: f"{name == package}")
            with pytest.raises(KeyboardInterrupt):
                command(model, text)
            assert command.job
            assert command.job.state is None
    with pytest.raises(KeyboardInterrupt):
        command(model, text)
    command.ends = True
    assert command(model, text, limit=7) == 7
    assert command(model, text) == 0  # the last one has ended


def test_a_terminal_shows_the_progress(edgelm: Edgelm, models: Path, long_text: Path) -> None:
    parent, child = pty.openpty()
    with subprocess.Popen(
        [*edgelm.command, "eval", str(models / "slow.gguf"), str(long_text), "--window", "64"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=child,
        env=edgelm.environment,
    ) as process:
        os.close(child)
        shown = b""
        while not re.search(rb"window [\d,]+ of about [\d,]+, perplexity [\d.]+, \d+ (s|min|h) left", shown):
            shown += os.read(parent, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    os.close(parent)


# -- bad input -----------------------------------------------------------------------------------------------------


def job_error(model: Path, text: Path, **options: object) -> str:
    """Return the error line of a job."""
    with pytest.raises(EdgeLMError) as failure:
        job_result(model, text, **options)
    return str(failure.value)


def test_invalid_texts(edgelm: Edgelm, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_bytes(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    model = models / "f32.gguf"
    os.mkfifo(tmp_path / "pipe")
    command = Command(monkeypatch, tmp_path)
    for file, expected in {
        tmp_path / "missing.txt": "missing.txt does not exist",
        tmp_path: "is not a regular file",
        tmp_path / "pipe": "is not a regular file",
        with_bytes("empty.txt", b""): "is empty",
        Path("nul\0byte"): "nul",
        Path("~nobody-of-that-name/a.txt"): "cannot be read",
        Path("x" * 5000): "cannot be read",
    }.items():
        with pytest.raises(EdgeLMError, match=expected):
            command(model, file)
    for file, expected in {
        with_bytes("zeros.bin", bytes(5000)): "is not a text",
        model: "f32.gguf is not",
        with_bytes("short.txt", b"hello world"): "less than one window of 512; give --stride 256",
    }.items():
        assert expected in job_error(model, file), file
    assert "no token" in job_error(model, with_bytes("mark.txt", b"\xef\xbb\xbf"), stride=5)
    latin = with_bytes("latin.txt", b"caf\xe9 and more")
    assert "latin.txt is not valid UTF-8 (byte 0xe9 at 3)" in error_of(edgelm.process("eval", model, latin))


def test_impossible_comparisons(
    edgelm: Edgelm, models: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models / "f32.gguf"
    command = Command(monkeypatch, tmp_path)
    for against, expected in {
        ("f16",): "the model itself with the same KV cache",
        (model,): "the model itself with the same KV cache",
        ("int8", "k8v4"): "two references",
        ("llama", "torch"): "two references",
        (model, models / "q8_0.gguf"): "two references",
        ("missing.gguf",): "missing.gguf does not exist",
    }.items():
        with pytest.raises(EdgeLMError, match=expected):
            command(model, text, *against)
    assert "--window is 1,000; give 4 to 512" in job_error(model, text, window=1000)
    assert "--stride is 512; give 1 to 511" in job_error(model, text, stride=512)
    assert "--stride is 0; give 1 to 511" in job_error(model, text, stride=0)
    narrow = write_tiny(tmp_path / "narrow.gguf", head_dim=48)
    assert "multiple of 32" in job_error(narrow, text, kv="int8")
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(model.read_bytes()[:200_000])
    assert "cut.gguf is cut short" in job_error(model, text, against=EvalSide(damaged, "f16"))
    message = error_of(edgelm.process("eval", model, text, "--against", models / "other.gguf"))
    assert "other.gguf has another vocabulary than f32.gguf" in message


TORCH = {"settings": Settings(threads=1, engine="torch", device="cpu")}


def test_the_torch_engine_refuses_the_same(models: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, small = (models / name for name in ("f32.gguf", "other.gguf", "q8_0.gguf"))
    against = EvalSide(other, "f16")
    assert "other.gguf has another vocabulary than f32.gguf" in job_error(model, text, against=against, **TORCH)
    monkeypatch.setattr("edgelm.backends.torch.evaluation.load_decoder", lambda *_: pytest.fail("it was loaded"))
    monkeypatch.setattr("edgelm.backends.torch.evaluation.available_memory_bytes", lambda: 2**28)
    message = job_error(model, text, against=EvalSide(small, "int8"), **TORCH)
    assert re.fullmatch(
        r"f32\.gguf and q8_0\.gguf need about [\d.]+ GiB with a window of 512, 0\.2 GiB are free; give a .*", message
    )


def test_logits_that_are_not_numbers(text: Path, tmp_path: Path) -> None:
    assert "not numbers" in job_error(write_tiny(tmp_path / "nan.gguf", nan_logits=True), text)


# -- the state on disk ----------------------------------------------------------------------------------------------


def test_a_state_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    key = {"text": "a"}
    saved = {"windows": 3, "bins": {"1": 2}, "mean": 0.1 + 0.2}
    StateFile(tmp_path, key).save(saved)
    assert StateFile(tmp_path, key).load() == saved
    assert StateFile(tmp_path, {"text": "b"}).load() is None
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-9], whole.replace(b'"windows": 3', b'"windows": 4'), b"[]", b'{"key": 1}', b"\xff"):
        file.write_bytes(damaged)
        assert StateFile(tmp_path, key).load() is None
    file.write_bytes(whole)
    StateFile(tmp_path, key).delete()
    assert not list(tmp_path.iterdir())


def test_an_old_state_is_deleted(tmp_path: Path) -> None:
    StateFile(tmp_path, {"text": "a"}).save({"windows": 3})
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, time.time() - MAX_AGE_S - 60))
    StateFile(tmp_path, {"text": "b"})
    assert not file.exists()


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = StateFile(tmp_path / "file" / "eval", {})
    state.save({"windows": 1})
    assert state.load() is None
