"""`edgelm eval` with several models: the table, the reference, a model that fails, and what is not done twice."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.machine.conditions import Conditions
from edgelm.base.workers.messages import EvalJob, EvalState, Result
from edgelm.commands import eval as eval_module
from edgelm.commands import eval_output, eval_speed, eval_table
from edgelm.commands.eval import Task, find_text
from edgelm.commands.eval_models import find_models, is_several
from edgelm.commands.eval_output import FIELDS, Form
from edgelm.commands.eval_table import eval_models
from edgelm.evaluation.kept import KeptResults
from edgelm.jobs.reader import read_contents
from edgelm.jobs.speed import BenchJob
from tests.commands.test_run import Edgelm
from tests.library.hub_folders import put
from tests.tiny import write_tiny

TEXT = "Once upon a time there was a little girl. She said hello to the big dog and her friend.\n"
QWEN = "Qwen/Qwen3-4B-GGUF"
KL = {"m-f16": 0.001, "m-q8_0": 0.01}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model in three types, and a text."""
    folder = tmp_path_factory.mktemp("models")
    for quant in ("f32", "f16", "q8_0"):
        write_tiny(folder / f"m-{quant}.gguf", context=512, quant=quant)
    (folder / "text.txt").write_text(TEXT * 60)
    return folder


class Judge:
    """The command with a fake worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.jobs: list[Any] = []
        self.fails: dict[str, BaseException] = {}  # by the stem of the model
        self.more: dict[str, dict[str, Any]] = {}  # other figures, by the stem of the model
        self.meanwhile: Callable[[], object] = lambda: None  # what happens while a model is evaluated
        self._capsys = capsys
        monkeypatch.setattr(eval_module, "run_job", self._run_job)
        monkeypatch.setattr(eval_speed, "run_job", self._run_job)
        monkeypatch.setattr(eval_table, "read_each", lambda requests: [read_contents(one.path) for one in requests])
        for kind in ("CONFIG", "DATA", "CACHE"):
            monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(home / kind))
        monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))

    @contextmanager
    def _run_job(self, job: EvalJob | BenchJob, *_: object) -> Iterator[Iterator[Any]]:
        self.jobs.append(job)
        yield self._replies(job)

    def _replies(self, job: EvalJob | BenchJob) -> Iterator[Any]:
        stem = job.model.stem
        if isinstance(job, BenchJob):
            runs = [float(len(self.jobs))] * job.repetitions
            results = [{"test": test.name, "tokens_per_second": runs[0], "runs": runs} for test in job.tests]
            yield Result({"model": stem, "engine": "llama", "device": "cpu", "results": results})
            return
        yield EvalState({"windows": 1}, 2)
        self.meanwhile()
        if stem in self.fails:
            raise self.fails[stem]
        side = {"perplexity": 5.0, "stderr": 0.1, "engine": "llama", "device": "cpu", "kv": job.kv}
        kl = KL.get(stem) if job.against else None
        agreement = None if kl is None else 1 - kl
        there = {"perplexity": 6.0, "file": job.against.model.name, "kv": job.against.kv} if job.against else {}
        against = side | there if job.against else None
        figures = {"mean_kl": kl, "mean_kl_stderr": kl, "p99_kl": kl, "top1_agreement": agreement}
        figures |= self.more.get(stem, {})
        yield Result(side | {"file": job.model.name, "tokens": 100, "windows": 2, "against": against, **figures})

    def __call__(
        self, *names: str | Path, text: Path, against: tuple[str, ...] = (), **options: Any
    ) -> tuple[int, str]:
        """Run the command; return its exit code and output."""
        self.jobs.clear()
        form = Form(**{key: options.pop(key) for key in ("plot", "svg", "as_json", "as_csv") if key in options})
        speed = options.pop("speed", False)
        task = Task(find_text(str(text)), **options)
        code = eval_models(list(map(str, names)), task, {}, against, speed=speed, form=form)
        return code, self._capsys.readouterr().out

    def evaluated(self) -> list[tuple[str, str | None]]:
        """Return the evaluations that a worker did: the model, and its reference."""
        jobs = [job for job in self.jobs if isinstance(job, EvalJob)]
        return [(job.model.stem, job.against.model.stem if job.against else None) for job in jobs]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Judge:
    return Judge(monkeypatch, tmp_path, capsys)


def rows_of(out: str) -> dict[str, dict[str, Any]]:
    return {model["label"]: model for model in json.loads(out)["models"]}


def test_a_model_is_measured_with_its_speed(server_environment: dict[str, str], models: Path) -> None:
    """With real workers, once."""
    edgelm = Edgelm(server_environment)
    model, picture = models / "m-q8_0.gguf", models / "picture.svg"
    done = edgelm("eval", model, models / "text.txt", "--limit", "1", "--against", "int8", "--svg", picture, "--json")
    assert done.returncode == 0, done.stderr
    assert b"1 of 1: m-q8_0: " in done.stderr
    document = json.loads(done.stdout)
    assert document["reference"] == "itself with int8 KV"
    (row,) = document["models"]
    assert row["bytes"] == model.stat().st_size
    assert 0 < row["mean_kl"] < 1
    assert set(row["types"]) == {"Q8_0", "F32"}
    assert min(row["prompt_tokens_per_second"], row["decode_tokens_per_second"]) > 0
    assert picture.read_text().startswith("<svg")
    shown = edgelm("show", model).stdout.decode()
    assert "same next token as m-q8_0 with int8 instead of f16" in shown
    assert "tokens/s, prompts" in shown


def test_the_largest_is_the_reference_and_has_a_row(judge: Judge, models: Path) -> None:
    code, out = judge(models, text=models / "text.txt", as_json=True)
    assert code == 0
    assert sorted(judge.evaluated()) == [("m-f16", "m-f32"), ("m-q8_0", "m-f32")]
    rows = rows_of(out)
    assert list(rows) == ["f32", "f16", "q8_0"]
    assert (rows["f32"]["mean_kl"], rows["f32"]["perplexity"], rows["q8_0"]["mean_kl"]) == (0.0, 6.0, 0.01)


def test_another_reference_may_be_named_and_joins_the_table(judge: Judge, models: Path) -> None:
    code, out = judge(
        models / "m-f16.gguf", text=models / "text.txt", against=(str(models / "m-q8_0.gguf"),), plot=True
    )
    assert code == 0
    assert judge.evaluated() == [("m-f16", "m-q8_0")]
    assert "KL FROM Q8_0" in out
    assert "size in" in out
    judge(models, text=models / "text.txt", against=("int8",))
    assert judge.evaluated() == [(stem, stem) for stem in ("m-f16", "m-f32", "m-q8_0")]


def test_what_is_known_is_not_done_again(
    judge: Judge, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = models / "text.txt"
    first = judge(models, text=text, speed=True, as_json=True)
    speeds = [job.model.stem for job in judge.jobs if isinstance(job, BenchJob)]
    assert speeds == ["m-f16", "m-f32", "m-q8_0", "m-q8_0", "m-f32", "m-f16"], "there and back"
    assert judge(models, text=text, speed=True, as_json=True) == first
    assert judge.jobs == []
    assert "the speeds say little: those of one model differed 2.7 times" in judge(models, text=text, speed=True)[1]
    monkeypatch.setattr(eval_table, "SPEED_AGE_S", 0)
    judge(models, text=text, speed=True)
    assert len(judge.jobs) == len(speeds), "yesterday's speeds are not compared with those of today"
    copy = shutil.copy(models / "m-q8_0.gguf", tmp_path / "copy.gguf")
    judge(copy, models / "m-f32.gguf", text=text)
    assert judge.jobs == [], "the same content at another path"
    write_tiny(tmp_path / "copy.gguf", context=512, quant="q8_0", seed=2)
    judge(copy, models / "m-f32.gguf", text=text)
    assert judge.evaluated() == [("copy", "m-f32")]
    for changed in ({"window": 64}, {"stride": 64}, {"limit": 1}, {"restart": True}):
        judge(models, text=text, **changed)
        assert len(judge.evaluated()) == 2, changed


def test_a_model_of_the_hub_is_kept_with_the_hashes_of_its_files(judge: Judge, models: Path, tmp_path: Path) -> None:
    data = (models / "m-q8_0.gguf").read_bytes()
    put(tmp_path / "hub", QWEN, {"Qwen3-4B-Q8_0.gguf": data})
    code, out = judge(models / "m-f32.gguf", text=models / "text.txt", against=("qwen3:4b:Q8_0",), as_json=True)
    assert code == 0
    assert set(rows_of(out)) == {"m-f32", "qwen3:4b:Q8_0"}
    kept = KeptResults(tmp_path / "DATA").of_blobs([hashlib.sha256(data).hexdigest()])
    assert kept
    assert kept.name == "Qwen3-4B-Q8_0.gguf"
    (result,) = kept.results
    assert (result.figures["perplexity"], result.figures["mean_kl"], result.figures["against"]) == (6.0, None, None)


def test_a_model_that_fails_is_a_row_with_its_reason(judge: Judge, models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    shutil.copytree(models, folder)
    (folder / "m-cut.gguf").write_bytes((models / "m-f32.gguf").read_bytes()[:200_000])
    judge.fails["m-f16"] = ModelError("it does not fit", "give less")
    code, out = judge(folder, text=models / "text.txt", as_json=True)
    assert code == 1
    rows = rows_of(out)
    assert rows["f16"]["error"] == "it does not fit; give less"
    assert "is cut short" in rows["cut"]["error"]
    assert rows["q8_0"]["mean_kl"] == 0.01
    code, out = judge(folder, text=models / "text.txt")
    assert "f16 was not evaluated: it does not fit; give less" in out
    assert judge.evaluated() == [("m-f16", "m-f32")], "only what failed is tried again"


def test_a_file_that_changes_has_no_result(judge: Judge, models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    shutil.copytree(models, folder)
    judge.meanwhile = lambda: write_tiny(folder / "m-f16.gguf", context=512, quant="f16", seed=3)
    code, out = judge(folder, text=models / "text.txt", as_json=True)
    assert code == 1
    assert "m-f16 was changed in the meantime" in rows_of(out)["f16"]["error"]
    judge.meanwhile = lambda: None
    judge(models, text=models / "text.txt")
    assert judge.evaluated() == [("m-f16", "m-f32")]


def test_an_interrupted_table_goes_on_with_the_interrupted_model(judge: Judge, models: Path) -> None:
    judge.fails["m-q8_0"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        judge(models, text=models / "text.txt")
    judge.fails.clear()
    assert judge(models, text=models / "text.txt")[0] == 0
    (job,) = judge.jobs
    assert (job.model.stem, job.state) == ("m-q8_0", {"windows": 1})


def test_the_forms(judge: Judge, models: Path, tmp_path: Path) -> None:
    text = models / "text.txt"
    _, out = judge(models, text=text, as_csv=True)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert tuple(rows[0]) == FIELDS
    assert [row["label"] for row in rows] == ["f32", "f16", "q8_0"]
    assert [row["mean_kl"] for row in rows] == ["0.0", "0.001", "0.01"]
    for form, expected in {("as_json", "as_csv"): "two forms", ("svg",): "cannot be written"}.items():
        values = {name: tmp_path / "no" / "a.svg" if name == "svg" else True for name in form}
        with pytest.raises(EdgeLMError, match=expected):
            judge(models, text=text, **values)
    assert judge.jobs == []


def test_the_picture_has_the_table_and_the_plot_and_loads_nothing(judge: Judge, models: Path, tmp_path: Path) -> None:
    assert judge(models, text=models / "text.txt", svg=tmp_path / "a.svg")[0] == 0
    source = (tmp_path / "a.svg").read_text()
    assert "url(http" not in source
    assert "@media (prefers-color-scheme: dark)" in source
    words = " ".join("".join(ET.fromstring(source).itertext()).split())
    for expected in ("MODEL SIZE BITS", "q8_0", "mean KL divergence from f32", "size in"):
        assert expected in words


def test_a_table_marks_what_is_not_distinguishable_and_says_on_what_it_was_measured(judge: Judge, models: Path) -> None:
    here = Conditions("0.6", "edgelm-llama 0.3.36", "AMD EPYC", 2, 0.0)
    noise = {"noise_floor": {"mean_kl": 0.0007}, "measured": asdict(here)}
    judge.more["m-f16"] = noise | {"distinguishable": False}
    judge.more["m-q8_0"] = noise | {"distinguishable": True, "measured": asdict(replace(here, others=1.5))}
    _, out = judge(models, text=models / "text.txt")
    (mark,) = re.findall(r"^f16 .*(≈ \S+)", out, re.MULTILINE)
    assert mark == "≈ 0.001000"
    assert out.count("≈") == 2
    assert "noise floor: KL 0.000700 of a model from itself, one token a step" in out
    assert "≈ not distinguishable from f32, KL not above twice the floor: f16\n" in out
    assert str(replace(here, others=1.5)) in " ".join(out.split())
    assert "quiet" not in out
    rows = rows_of(judge(models, text=models / "text.txt", as_json=True)[1])
    assert {label: row["distinguishable"] for label, row in rows.items()} == {"f32": None, "f16": False, "q8_0": True}
    assert rows["f16"]["kl_noise_floor"] == 0.0007


def test_a_long_name_takes_no_room_from_the_figures(
    judge: Judge, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_output, "plain_console", lambda: Console(width=80, highlight=False, markup=False))
    long = shutil.copy(models / "m-q8_0.gguf", tmp_path / "a-model-with-a-name-of-quite-some-length-and-Q8_0.gguf")
    code, out = judge(long, models / "m-f32.gguf", text=models / "text.txt", speed=True)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for figure in ("5.0000", "6.0000", "PERPLEXITY", "DECODE/S"):
        assert figure in out


def test_names_of_several_models(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path))
    config = load_config({})
    data = (models / "m-q8_0.gguf").read_bytes()
    put(tmp_path / "hub", QWEN, {"Qwen3-4B-Q4_K_M.gguf": data, "Qwen3-4B-Q8_0.gguf": data + b" "})
    for name in ("qwen3:4b:all", "qwen3:4b:*", f"{QWEN}:all"):
        assert is_several([name])
        assert sorted(model.quantization or "" for model in find_models([name], config)) == ["Q4_K_M", "Q8_0"]
    one = str(models / "m-f32.gguf")
    assert not is_several([one])
    assert is_several([str(models)])
    assert [model.path.stem for model in find_models([one, str(models)], config)] == ["m-f32", "m-f16", "m-q8_0"]
    for name, expected in {
        "qwen3:8b:all": "nothing of Qwen/Qwen3-8B-GGUF is on this machine",
        "starter:all": "is no repository",
        str(tmp_path): "is a folder without",
        "nothing.gguf": "does not exist",
    }.items():
        with pytest.raises(EdgeLMError, match=expected):
            find_models([name], config)
