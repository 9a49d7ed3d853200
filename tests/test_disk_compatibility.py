"""Files that edgelm 0.3.1 wrote are read by this version, value by value (tests/data/disk_0_3_1/README.md)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends.build import build
from edgelm.backends.drafting import vocabulary_sample
from edgelm.backends.llama import build as build_module
from edgelm.backends.llama import executor as executor_module
from edgelm.backends.llama.executor import LlamaOptions, state_identity
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.snapshot_files import PROMPT_TOKENS, Bounds, SnapshotFolder
from edgelm.base import runtime
from edgelm.base.config import Settings, load_config
from edgelm.base.machine import facts as facts_module
from edgelm.base.machine.bandwidth import read_bandwidth
from edgelm.base.machine.cpu import Cores
from edgelm.base.machine.llama_build import SUPPORTED, InstalledLlama
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.chats.store import Store
from edgelm.checkpoints.files import file_identity
from edgelm.commands.eval import StateFile
from edgelm.engine.core import ExecutorInfo, SamplingParams
from edgelm.engine.speculation.acceptance import Acceptance
from edgelm.engine.speculation.past_answers import AnswersFile, info, path_for
from edgelm.engine.step_times import StepTimes
from edgelm.kernels.gpu_target import Target
from edgelm.kernels.tuning import Table
from edgelm.library.scan import last_use, note_use
from edgelm.text.chat import render_chat
from edgelm.text.chat_tokens import encode_rendered
from edgelm.text.prompt_token_cache import PromptTokenCache
from edgelm.text.template import ChatTemplate
from tests.completion import complete
from tests.tiny import write_tiny

WRITTEN = Path(__file__).parent / "data" / "disk_0_3_1"
EXPECTED: dict[str, Any] = json.loads((WRITTEN / "expected.json").read_text(encoding="utf-8"))
FOREVER = Bounds(2**30, 1e12)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """The user's folders as 0.3.1 left them: copies, because reading may write."""
    kinds = ("config", "data", "cache", "runtime")
    for kind in kinds:
        shutil.copytree(WRITTEN / kind, tmp_path / kind)
    return Places({f"EDGELM_{kind.upper()}_DIR": str(tmp_path / kind) for kind in kinds})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that 0.3.1 ran, with the same bytes and time."""
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", **EXPECTED["model"])
    os.utime(path, ns=(1_750_000_000 * 10**9,) * 2)
    return path


def as_json(value: object) -> Any:
    """Return a value as it looks after a way through JSON: tuples become lists."""
    return json.loads(json.dumps(value))


def test_every_setting_of_the_file_is_in_force(places: Places) -> None:
    config = load_config({}, places.environment)
    settings = as_json(asdict(config.settings))
    assert {name: settings[name] for name in EXPECTED["config"]} == EXPECTED["config"]


def without_marks(snippet: str) -> str:
    """Return a snippet without the marks of its matches: 0.3.1 marked the word of a letter, later ones the letter."""
    return snippet.replace("\2", "").replace("\3", "")


def test_chats_keep_their_branches_parameters_and_shortening(places: Places) -> None:
    store = Store(places.data / "chats.db")
    expected = EXPECTED["chats"]
    # Later than 0.3.1: a value of each kind that means "none".
    new_of_chat = {
        "knowledge": (), "consents": {}, "summarized": False, "preset": "", "tools": (), "tool_consents": (),
        "pinned": False, "archived": False, "tags": (), "deleted": None,
    }  # fmt: skip
    new_of_message = {"reading": None, "attachments": (), "calls": ()}
    assert [asdict(chat) for chat in store.chats()] == [chat | new_of_chat for chat in expected["chats"]]
    for chat_id, messages in expected["messages"].items():
        expected_messages = [message | new_of_message for message in messages]
        assert [asdict(message) for message in store.messages(int(chat_id))] == expected_messages
    assert store.settings() == expected["settings"]
    assert store.prompts(10) == expected["prompts"]
    for query, hits in expected["search"].items():
        found = [[hit.chat.id, hit.message, without_marks(hit.snippet)] for hit in store.search(query)]
        assert found == [[*where, without_marks(snippet)] for *where, snippet in hits]
    store.close()


def test_past_answers_are_read_by_namespace(places: Places, model: Path) -> None:
    expected = EXPECTED["past_answers"]
    native = LlamaModel(model)
    path = path_for(places.data, vocabulary_sample(LlamaTokenizer.of_model(native.native, native)))
    native.close()
    assert path.name == expected["file"]
    file = AnswersFile(path)
    for namespace, answers in expected["namespaces"].items():
        assert [list(answer) for answer in file.read(namespace)] == answers
    (summary,) = info(path.parent)
    assert (summary.answers, summary.tokens, summary.nbytes, summary.since) == (
        *(expected[name] for name in ("num_answers", "num_tokens", "num_bytes", "since")),
    )
    names = [path_for(Path(), pieces).name for pieces in ([b"a", b"bc", b""], [b"ab", b"c"])]
    assert names == expected["path_for"]
    file.append("bob", [1, 2])
    assert [list(answer) for answer in file.read("bob")] == [*expected["namespaces"]["bob"], [1, 2]]


def test_acceptance_goes_on_from_what_was_learnt(places: Places) -> None:
    expected = EXPECTED["acceptance"]
    path = places.cache / "acceptance" / expected["file"]
    acceptance = Acceptance.load(path)
    evidence = (((5, 0, 0), None), ((5, 1, 7), (5, 2, 9)), (None, (8, 0, 3)), ((4, 2, 11), (6, 3, 20)))
    assert as_json([acceptance.judge(*pair) for pair in evidence]) == expected["judged"]
    assert [acceptance.reach.shares(level) for level in range(3)] == expected["shares"]
    before = json.loads(path.read_bytes())
    acceptance.save(path)
    assert json.loads(path.read_bytes()) == before


def test_step_times_are_found_under_the_same_name(places: Places) -> None:
    expected = EXPECTED["step_times"]
    identity, executor_info, machine = expected["identity"]
    times = StepTimes(places.cache / "step-times", [identity, ExecutorInfo(**executor_info), tuple(machine)])
    assert as_json(times.points) == expected["points"]
    assert as_json(times.surface()) == expected["surface"]
    for case in expected["named"]:
        other = StepTimes(Path(), ["00ff", ExecutorInfo(**case["info"]), ("a-machine", 3)])
        assert other._path.name == case["file"]


def test_the_machine_is_tried_once_more(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts of 0.3.1 were about OpenMP's threads too, and are not read; the bandwidth is."""
    expected = EXPECTED["machine"]
    monkeypatch.setattr(facts_module, "machine_key", lambda *_: expected["key"])
    measured = facts_module.MachineFacts(canary="ok")
    monkeypatch.setattr(facts_module, "measure", lambda *_: (measured, True))
    lines: list[str] = []
    for _ in range(2):
        assert facts_module.facts(places.cache, notify=lines.append) == measured
    assert len(lines) == 1
    path = places.cache / "machine" / f"{expected['key']}-bandwidth.json"
    for threads, speed in expected["bandwidth"].items():
        assert read_bandwidth(path, int(threads), lambda _: 1.0) == (speed, None)


def test_the_machine_has_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = tmp_path / "edgelm_llama" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libllama.so").write_bytes(b"12345")
    os.utime(libraries / "libllama.so", ns=(10**18, 10**18))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(
        "processor : 0\nmodel name : A\ncpu MHz : 1\nflags : x y\n\nprocessor : 1\n"
    )
    installed = InstalledLlama("edgelm-llama", "0.0.1", libraries)
    monkeypatch.setattr(facts_module, "find_build", lambda: installed)
    monkeypatch.setattr(facts_module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(facts_module.platform, "processor", lambda: "p")
    # The recipe of 0.5.0, written out.
    stats = [("libllama.so", 5, 10**18)]
    processor = ["x86_64", "p", "model name : A", "flags : x y"]
    identity = (2, "edgelm-llama", "0.0.1", str(libraries), stats, processor, (2, 4))
    assert facts_module.machine_key(Cores(2, 4), tmp_path) == hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def test_a_models_files_have_the_same_identity(model: Path) -> None:
    assert hashlib.sha256(b"".join(file_identity([model]))).hexdigest() == EXPECTED["file_identity"]


@pytest.mark.parametrize(
    ("kv", "types"), [("f16", [1, 1, False]), ("k8v16", [8, 1, False]), ("int8", [8, 8, True]), ("k8v4", [8, 2, True])]
)
def test_a_models_states_have_the_same_identity(model: Path, kv: str, types: list[object]) -> None:
    library = Path(executor_module.L._lib._name).stat()
    # The recipe of 0.3.1, written out.
    llama = executor_module.L.llama_version()
    recipe = [llama, library.st_size, library.st_mtime_ns, *types]
    digest = hashlib.blake2b(repr(recipe).encode() + b"".join(file_identity([model])), digest_size=16).digest()
    native = LlamaModel(model)
    assert state_identity(native, [model], LlamaOptions(context=640, kv=kv)) == digest
    native.close()


def test_snapshots_are_read(places: Places) -> None:
    expected = EXPECTED["snapshots"]
    folder = SnapshotFolder(places.prefixes, bytes.fromhex(expected["identity"]), FOREVER)
    files = {file.name: file for file in folder.files()}
    assert files.keys() == expected["files"].keys()
    for name, values in expected["files"].items():
        assert (files[name].cache_namespace, files[name].tokens.tolist()) == (values["namespace"], values["tokens"])
        state = folder.read(name)
        assert state is not None
        assert hashlib.sha256(state).hexdigest() == values["state"]
        folder.write(files[name].tokens, files[name].cache_namespace, state)  # the same name: nothing is written twice
    assert len(list(places.prefixes.rglob("*.kv"))) == len(files)


def test_conversations_keep_the_tokens_that_were_generated(places: Places, model: Path) -> None:
    native = LlamaModel(model)
    tokenizer = LlamaTokenizer.of_model(native.native, native)
    template = ChatTemplate.of(tokenizer)
    cache = PromptTokenCache(places.prefixes / EXPECTED["snapshots"]["identity"] / PROMPT_TOKENS)
    for conversation in EXPECTED["conversations"]:
        rendered = render_chat(template, [*conversation["messages"], {"role": "user", "content": "And then?"}])
        tokens = conversation["tokens"]
        assert encode_rendered(tokenizer, template, rendered)[: len(tokens)] != tokens
        assert cache.encode(tokenizer, template, rendered, "stranger").ids[: len(tokens)] != tokens
        assert cache.encode(tokenizer, template, rendered, conversation["namespace"]).ids[: len(tokens)] == tokens
    native.close()


@pytest.mark.skipif(EXPECTED["llama_cpp_python"] != SUPPORTED, reason="another llama.cpp may refuse these states")
def test_an_engine_goes_on_from_the_snapshots(places: Places, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = bytes.fromhex(EXPECTED["snapshots"]["identity"])  # it names the build of llama.cpp that wrote them
    monkeypatch.setattr(build_module, "state_identity", lambda *_: identity)
    settings = Settings(ctx=640, kv="int8", engine="llama", threads=1, parallel=2)
    loaded = build(EngineJob(model=model, settings=settings, prefixes=places.prefixes))

    async def cached(tokens: list[int], namespace: str) -> int:
        params = SamplingParams(temperature=0, max_tokens=2)
        prompt = [*tokens, 300, 301]
        completion = complete(loaded.engine, loaded.tokenizer, prompt, params, cache_namespace=namespace)
        (stats,) = [delta.stats async for delta in completion if delta.stats]
        return stats.cached_tokens

    try:
        for file in EXPECTED["snapshots"]["files"].values():
            assert asyncio.run(cached(file["tokens"], "stranger")) == 0
            assert asyncio.run(cached(file["tokens"], file["namespace"])) == len(file["tokens"])
    finally:
        loaded.engine.close()


def test_an_interrupted_evaluation_goes_on(places: Places) -> None:
    expected = EXPECTED["eval"]
    assert StateFile(places.cache / "eval", expected["key"]).load() == expected["state"]


def test_the_last_use_of_a_model_is_found(places: Places) -> None:
    model = Path(EXPECTED["used"]["model"])
    (file,) = (places.data / "used").iterdir()
    os.utime(file, (1_700_000_000, 1_700_000_000))
    assert last_use(places.data, model) == 1_700_000_000
    before = file.read_bytes()
    note_use(places.data, model)
    assert (list((places.data / "used").iterdir()), file.read_bytes()) == ([file], before)


def test_a_front_that_runs_is_found(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "is_alive", lambda pid: pid == EXPECTED["front"]["pid"])
    record = runtime.find_front(places.runtime)
    assert record is not None
    assert {"pid": record.pid, "address": record.address} == EXPECTED["front"]


def test_kernels_tuned_before_they_changed_are_measured_again(places: Places) -> None:
    expected = EXPECTED["kernels"]
    (former,) = (places.cache / "kernels").iterdir()
    assert json.loads(former.read_text(encoding="utf-8")) == expected["table"]
    table = Table()
    table.open(places.cache / "kernels", Target(*expected["target"]))
    assert table.path is not None
    assert table.path != former
    assert table.stored == {}
