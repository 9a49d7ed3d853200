"""Files that edgelm 0.5.0 left are read by this version, and a server goes on with them (tests/data/disk_0_5_0)."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends.snapshot_files import Bounds, SnapshotFolder
from edgelm.base import runtime
from edgelm.base.config import load_config
from edgelm.base.places import Places
from edgelm.chats.store import Store
from edgelm.chats.tools.consents import Consents
from edgelm.commands import ps
from edgelm.commands.presets import read_presets
from edgelm.commands.service.launchd import LABEL, Launchd
from edgelm.commands.service.system import Definition, Outcome
from edgelm.commands.service.systemd import SERVICE, SOCKET, Systemd, socket_address
from edgelm.engine.speculation.acceptance import Acceptance
from edgelm.engine.speculation.past_answers import AnswersFile
from edgelm.engine.step_times import StepTimes
from edgelm.evaluation.kept import KeptResults
from edgelm.library.hub import Hub
from edgelm.library.hub_cache import all_unfinished
from edgelm.library.names import HubReference
from edgelm.library.pull import pull
from edgelm.library.scan import last_use
from edgelm.server.keys import read_key_file
from tests.library.conftest import QUICK
from tests.library.hub_server import HubServer
from tests.server.harness import serving
from tests.tiny import write_tiny

WRITTEN = Path(__file__).parent / "data" / "disk_0_5_0"
EXPECTED: dict[str, Any] = json.loads((WRITTEN / "expected.json").read_text(encoding="utf-8"))
LEFT = Path("/tmp/edgelm-0.5.0")  # where they were written: some files have its name


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """The user's folders as 0.5.0 left them: copies, because reading may write. Git does not keep their modes."""
    kinds = ("config", "data", "cache", "runtime")
    for kind in kinds:
        shutil.copytree(WRITTEN / kind, tmp_path / kind)
        for path in (tmp_path / kind, *(tmp_path / kind).rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
    return Places({f"EDGELM_{kind.upper()}_DIR": str(tmp_path / kind) for kind in kinds})


def as_json(value: object) -> Any:
    """Return a value as it looks after a way through JSON: tuples become lists."""
    return json.loads(json.dumps(value))


def test_settings_presets_and_folders_are_in_force(places: Places) -> None:
    config = load_config({}, places.environment)
    assert {name: getattr(config.settings, name) for name in EXPECTED["config"]} == EXPECTED["config"]
    presets = read_presets(config)
    values = {each.name: [each.system, each.model, each.sampling, each.tools] for each in presets.by_name.values()}
    assert as_json(values) == EXPECTED["presets"]
    assert [f"{Path(folder).name}: {name}" for folder, name in presets.folders.items()] == EXPECTED["folders"]
    assert presets.tools == ("files",)


def test_chats_keep_attachments_calls_passages_and_their_place(places: Places) -> None:
    expected = EXPECTED["chats"]
    with closing(Store(places.data / "chats.db")) as store:
        assert as_json([asdict(chat) for chat in store.chats()]) == expected["chats"]
        assert as_json([asdict(chat) for chat in store.deleted_chats()]) == expected["deleted"]
        for chat_id, messages in expected["messages"].items():
            values = [asdict(message) for message in store.messages(int(chat_id))]
            for value in values:
                value["attachments"] = [item | {"data": item["data"].hex()} for item in value["attachments"]]
            assert as_json(values) == messages
        assert store.settings() == expected["settings"]


def test_consents_results_and_the_last_use_are_found(places: Places) -> None:
    assert list(Consents(places.data / "tool_consents.json").marks()) == EXPECTED["consents"]
    kept = KeptResults(places.data).of(EXPECTED["kept"]["identity"])
    assert kept
    assert as_json(asdict(kept)) == EXPECTED["kept"]
    assert last_use(places.data, LEFT / "tiny.gguf")


def test_answers_and_snapshots_are_read_by_namespace(places: Places) -> None:
    namespaces = {namespace for *_, namespace in EXPECTED["keys"]}
    (answers,) = (places.data / "memory").iterdir()
    assert all(len(list(AnswersFile(answers).read(namespace))) == 2 for namespace in namespaces)
    (folder,) = places.prefixes.iterdir()
    snapshots = SnapshotFolder(places.prefixes, bytes.fromhex(folder.name), Bounds(2**30, 1e12))
    assert {file.cache_namespace for file in snapshots.files()} == namespaces
    assert all(snapshots.read(file.name) is not None for file in snapshots.files())
    assert len(list(folder.glob("*.kv"))) == 2, "none was deleted as damaged"


def test_step_times_and_acceptance_go_on(places: Places) -> None:
    (left,) = (places.cache / "step-times").iterdir()
    written = json.loads(left.read_bytes())
    times = StepTimes(left.parent, ["a model, an engine, a machine"])
    assert times.points == []
    left.rename(times._path)  # its name tells of the machine and the build that were measured
    assert as_json(StepTimes(left.parent, ["a model, an engine, a machine"]).points) == written != []
    (path,) = (places.cache / "acceptance").iterdir()
    (folder,) = places.prefixes.iterdir()
    assert path.stem == folder.name, "both by the identity of the model's states, whose recipe is tested for 0.3.1"
    learnt = json.loads(path.read_bytes())
    learnt["seen"][7] += 5.0  # four short answers taught it nothing
    learnt["offsets"][3] = 0.25
    learnt["reached"][1][2] += 1.5
    path.write_text(json.dumps(learnt))
    Acceptance.load(path).save(path)
    assert json.loads(path.read_bytes()) == learnt


def test_the_keys_are_the_same(places: Places) -> None:
    keys = read_key_file(places.config / "keys")
    assert [[key.name, key.secret, key.admin, key.cache_namespace] for key in keys] == EXPECTED["keys"]


def test_a_server_that_runs_is_found(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "is_alive", lambda pid: pid == EXPECTED["front"]["pid"])
    record = runtime.find_front(places.runtime, "of this version")
    assert record is not None
    assert {"pid": record.pid, "address": record.address, "key": record.key} == EXPECTED["front"]
    assert record.serves("of this version"), "it does not tell which library it has"


def test_ps_says_how_the_new_version_gets_to_a_server_that_runs(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = runtime.FrontRecord(EXPECTED["front"]["pid"], EXPECTED["front"]["address"])
    monkeypatch.setattr(ps, "load_config", lambda _: load_config({}, places.environment))
    monkeypatch.setattr(ps, "find_fronts", lambda *_: [record])
    monkeypatch.setattr(ps, "__version__", "0.6.0")
    again = "and this command is 0.6.0: restart it (a service: `edgelm service install`)"
    for version in ("0.5.0", "0.5.10", "0.6.0.dev0", "0.6.0", "0.6.1.dev0", "0.6.1", "0.10.0"):
        state = {"version": version, "address": record.address, "pid": record.pid, "models": []}
        monkeypatch.setattr(ps, "get_state", lambda _, state=state: state)
        ps.show_processes()
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == [f"edgelm {version} at {record.address} (pid {record.pid})", "no model is loaded"]
        is_older = version in ("0.5.0", "0.5.10", "0.6.0.dev0")
        assert lines[2:] == [f"the server still runs {version}, {again}"] * is_older


def test_a_service_is_known_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "units"
    shutil.copytree(WRITTEN / "units", folder)
    ran: list[str] = []

    def run(command: Sequence[str]) -> Outcome:
        ran.append(" ".join(command))
        return Outcome(0, "active", "")

    service = Systemd(folder, run)
    assert socket_address(folder) == "127.0.0.1:12345"
    assert service.state() == {SOCKET: "active", SERVICE: "active"}
    assert service.remove()
    assert any("disable --now" in line for line in ran)
    assert list(folder.iterdir()) == []


def test_an_agent_of_launchd_is_known_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    shutil.copytree(WRITTEN / "agents", folder)
    (left,) = folder.iterdir()
    ran: list[str] = []

    def run(command: Sequence[str]) -> Outcome:
        ran.append(" ".join(command))
        return Outcome(0, "\tstate = running", "")

    service = Launchd(folder, Path("/Users/ann/Library/Logs/edgelm.log"), run)
    command = ("/opt/edgelm/bin/python", "-P", "-m", "edgelm", "serve")
    assert service.files(Definition(command, "127.0.0.1", 12345)) == {left: left.read_text()}, (
        "nothing is to be written anew"
    )
    assert service.state() == {LABEL: "running"}
    assert service.remove()
    assert any("bootout" in line for line in ran)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("unit", [SOCKET, SERVICE])
def test_the_units_need_not_be_written_anew(unit: str) -> None:
    folder = WRITTEN / "units"
    command = ("/opt/edgelm/bin/python", "-P", "-m", "edgelm", "serve")
    files = Systemd(folder).files(Definition(command, "127.0.0.1", 12345))
    written = files[folder / unit]
    for new in ("FreeBind=yes\n", "OOMPolicy=continue\n"):  # of use at some addresses, and when memory runs out
        written = written.replace(new, "")
    assert written == (folder / unit).read_text()


def test_a_half_pull_is_listed_and_goes_on(tmp_path: Path) -> None:
    cache, expected = tmp_path / "hf", EXPECTED["part"]
    shutil.copytree(WRITTEN / "hf", cache)
    (unfinished,) = all_unfinished(cache)
    assert (unfinished.repository, unfinished.file, unfinished.nbytes) == tuple(expected.values())
    content = random.Random(5).randbytes(3 * 2**16)  # as in make.txt
    with HubServer() as server:
        server.add(expected["repository"], {expected["file"]: content})
        pulled = pull(HubReference(expected["repository"]), Hub(server.url, cache, QUICK), lambda _: None)
        assert server.sent_bytes(expected["file"]) == len(content) - expected["size"]
    assert pulled.path.read_bytes() == content
    assert all_unfinished(cache) == []


def test_a_server_goes_on_with_keys_settings_and_stored_responses(places: Places, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", **EXPECTED["model"])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
    with tempfile.TemporaryDirectory(prefix="edgelm-test-") as folder:
        own = clean | places.environment | {"EDGELM_RUNTIME_DIR": folder, "HF_HOME": str(tmp_path / "hf")}
        flags = ("--api-key-file", places.config / "keys", "--ctx", "640", "--threads", "1")
        with serving(own, model, *flags, log=tmp_path / "log") as front:
            assert front.http.get("/v1/models").status_code == 401
            for secret, responses in EXPECTED["responses"].items():
                headers = {"authorization": f"Bearer {secret}"}
                for name, response in responses:
                    assert front.http.get(f"/v1/responses/{name}", headers=headers).json() == response
                last = {"previous_response_id": responses[-1][0], "model": "tiny", "max_output_tokens": 4}
                answer = front.http.post("/v1/responses", json=last | {"input": "And?"}, headers=headers).json()
                begun = responses[-1][1]["usage"]["total_tokens"]
                assert answer["usage"]["input_tokens"] > begun, "the conversation is before the question"
                stranger = {"authorization": "Bearer " + next(each for each in EXPECTED["responses"] if each != secret)}
                assert front.http.get(f"/v1/responses/{responses[0][0]}", headers=stranger).status_code == 404
    assert "error" not in (tmp_path / "log").read_text()
