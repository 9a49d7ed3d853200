"""First use decides from how children end, keeps what is lasting, and never does native work itself."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgelm.base.errors import EngineError
from edgelm.base.machine import facts as machine
from edgelm.base.machine.cpu import Cores
from edgelm.base.machine.facts import MachineFacts, facts, machine_key
from edgelm.base.machine.llama_build import SUPPORTED, InstalledLlama

FAKE_CHILD = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
mode = {{"checkkernels": "check"}}[job["event"]]
folder, no_repack = job["folder"], not job["repack"]
policy = os.environ.get("OMP_WAIT_POLICY")
with open({log!r}, "a") as log:
    print(mode, folder, "plain" if no_repack else "fast", policy, os.environ.get("GGML_NO_BACKTRACE"), file=log)
open(os.path.join(folder, mode + ".gguf"), "w").close()
def die(name):
    print("first line", file=sys.stderr)
    print("GGML_ASSERT(x) failed", file=sys.stderr, flush=True)
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(60)
{body}
print(json.dumps({{"event": "checked"}}))
"""


class Fixture:
    """A cache folder, a fake canary that behaves as told, and what was seen."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.log = folder / "calls"
        self.script = folder / "child.py"
        self.notes: list[str] = []

    def facts(self, body: str = "") -> MachineFacts:
        text = FAKE_CHILD.format(log=str(self.log), body=body)
        if not self.script.exists() or self.script.read_text() != text:  # another child may be reading it
            self.script.write_text(text)
        return facts(self.cache, notify=self.notes.append, command=(sys.executable, "-I", "-S", str(self.script)))

    @property
    def calls(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def kept(self) -> list[Path]:
        return list((self.cache / "machine").glob("*")) if self.cache.is_dir() else []


@pytest.fixture
def fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    monkeypatch.setattr(machine, "usable_cores", lambda: Cores(2, 2))
    return Fixture(tmp_path)


def test_a_good_machine_is_checked_once(fixture: Fixture) -> None:
    found = fixture.facts()
    assert found == MachineFacts(canary="ok")
    assert found.repack
    found.require_working()
    assert [call[2:] for call in fixture.calls] == [["fast", "PASSIVE", "1"]]
    assert fixture.facts("die('SIGSEGV')") == found
    assert len(fixture.calls) == 1
    assert fixture.notes == ["checking llama.cpp on this machine, once"]
    (file,) = fixture.kept
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE"])
def test_a_crash_of_the_fast_kernels_chooses_the_plain_ones(fixture: Fixture, name: str) -> None:
    body = f"if not no_repack: die({name!r})"
    found = fixture.facts(body)
    assert (found.canary, found.repack) == ("no_repack", False)
    assert name in found.reason
    found.require_working()
    assert {call[2] for call in fixture.calls[1:]} == {"plain"}
    assert name in fixture.notes[1]
    assert fixture.facts(body) == found
    assert len(fixture.calls) == 2


@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("has_pip", [True, False])
def test_the_note_has_the_command_that_mends_it(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, has_amx: bool, has_pip: bool
) -> None:
    monkeypatch.setattr(machine, "has_amx", lambda: has_amx)
    monkeypatch.setattr(machine, "has_pip", lambda: has_pip)
    fixture.facts("if not no_repack: die('SIGSEGV')")
    cost, _, command = fixture.notes[-1].partition("; compile llama.cpp here: ")
    assert cost.endswith("at about 0.6 times the speed")
    assert command.endswith(f"--no-deps --no-binary llama-cpp-python llama-cpp-python=={SUPPORTED}")
    assert (" -m pip install " in command) == has_pip
    assert ("uv pip install --python " in command) != has_pip
    assert command.startswith("CFLAGS='-mno-amx-tile") == has_amx


@pytest.mark.parametrize("has_amx", [True, False])
def test_only_amx_is_switched_off_where_it_alone_is_wrong(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, has_amx: bool
) -> None:
    monkeypatch.setattr(machine, "has_amx", lambda: has_amx)
    body = "if not no_repack and 'EDGELM_NO_AMX' not in os.environ: die('SIGSEGV')"
    found = fixture.facts(body)
    assert found.canary == ("no_amx" if has_amx else "no_repack")
    assert found.repack == has_amx
    assert found.environment == (machine.NO_AMX if has_amx else {})
    assert "SIGSEGV" in fixture.notes[1]
    assert ("with AMX" in fixture.notes[1]) == has_amx
    assert fixture.facts(body) == found
    assert [call[2] for call in fixture.calls] == ["fast", "fast" if has_amx else "plain"]


def test_kernels_that_are_wrong_without_amx_too_are_not_used(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_amx", lambda: True)
    found = fixture.facts("if not no_repack: die('SIGILL')")
    assert (found.canary, found.environment) == ("no_repack", {})
    assert [call[2] for call in fixture.calls] == ["fast", "fast", "plain"]


def test_wrong_numbers_choose_the_plain_kernels(fixture: Fixture) -> None:
    body = "if not no_repack: print(json.dumps({'event': 'checked', 'reason': 'logits are not numbers'})); sys.exit()"
    found = fixture.facts(body)
    assert found.canary == "no_repack"
    assert "logits are not numbers" in found.reason
    assert len(fixture.kept) == 1


def test_a_child_that_hangs_is_no_lasting_fact(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TIME_LIMIT_S", 1)
    assert fixture.facts("if not no_repack: time.sleep(60)").canary == "no_repack"
    assert fixture.kept == []
    assert fixture.facts().canary == "ok"


def test_a_llama_cpp_that_always_crashes_is_one_clear_error(fixture: Fixture) -> None:
    found = fixture.facts("die('SIGILL')")
    assert found.canary == "failed"
    with pytest.raises(EngineError) as caught:
        found.require_working()
    assert caught.value.message == "llama.cpp crashes on this machine (SIGILL): GGML_ASSERT(x) failed"
    assert caught.value.hint == machine.reinstall()
    assert len(fixture.calls) == 2
    assert fixture.kept == []
    assert fixture.facts().canary == "ok"  # repaired, and known at once


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ImportError('libgomp.so.1: no such file')", "ImportError: libgomp.so.1: no such file"),
        ("sys.exit(3)", "ended with code 3"),
        ("die('SIGKILL')", "GGML_ASSERT"),  # the memory killer, or a person: says nothing of the kernels
    ],
)
def test_other_ends_are_errors_and_no_facts(fixture: Fixture, body: str, said: str) -> None:
    with pytest.raises(EngineError, match=r"llama\.cpp could not be tried") as caught:
        fixture.facts(body)
    assert said in caught.value.message
    assert "\n" not in str(caught.value)
    assert fixture.kept == []


def test_a_llama_cpp_that_cannot_be_loaded_says_why_in_its_own_words(fixture: Fixture) -> None:
    words = "llama.cpp cannot be loaded: libgomp.so.1: cannot open shared object file; install libgomp.so.1"
    body = f"sys.stderr.write('Traceback\\nedgelm.base.errors.EngineError: {words}\\n'); sys.exit(1)"
    with pytest.raises(EngineError) as caught:
        fixture.facts(body)
    assert str(caught.value) == words
    assert fixture.kept == []


def test_a_missing_command_is_an_error(fixture: Fixture) -> None:
    with pytest.raises(EngineError, match="could not be tried"):
        facts(fixture.cache, notify=fixture.notes.append, command=(str(fixture.cache / "nothing"),))


@pytest.mark.parametrize("body", ["", "die('SIGSEGV')", "sys.exit(1)"])
def test_the_models_are_removed_however_the_child_ends(fixture: Fixture, body: str) -> None:
    try:
        fixture.facts(body)
    except EngineError:
        assert body == "sys.exit(1)"
    folders = {call[1] for call in fixture.calls}
    assert len(folders) == 1
    assert not any(map(os.path.exists, folders))


GOOD: dict[str, object] = {"canary": "no_repack", "reason": "kept"}
BAD_FIELDS: list[tuple[str, object]] = [
    ("canary", "failed"),
    ("canary", 1),
    ("canary", []),
    ("reason", 5),
    ("wait_policy", "passive"),
    ("more", 5),
]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"[" * 50_000,
        b'"' + b"x" * 100_000 + b'"',
        *(json.dumps(GOOD | {name: bad}).encode() for name, bad in BAD_FIELDS),
        json.dumps(GOOD).encode() + b" " * 100_000,
    ],
    ids=lambda content: repr(content[:80]),
)
def test_a_damaged_file_is_made_anew(fixture: Fixture, content: bytes) -> None:
    found = fixture.facts()
    (file,) = fixture.kept
    file.write_bytes(content)
    assert fixture.facts() == found
    assert len(fixture.calls) == 2
    assert json.loads(file.read_text())["canary"] == "ok"


def test_a_kept_file_is_believed(fixture: Fixture) -> None:
    fixture.facts()
    (file,) = fixture.kept
    file.write_text(json.dumps(GOOD))
    assert fixture.facts().reason == "kept"


@pytest.mark.parametrize("spoil", [Path.touch, lambda path: (path.mkdir(), (path / "machine").touch())])
def test_a_folder_that_cannot_be_written_means_measuring_again(
    fixture: Fixture, spoil: Callable[[Path], object]
) -> None:
    spoil(fixture.cache)
    assert fixture.facts().canary == "ok"
    assert fixture.facts().canary == "ok"
    assert len(fixture.calls) == 2


def test_a_folder_in_the_files_place_leaves_no_temporary_file(fixture: Fixture) -> None:
    name = machine_key(Cores(2, 2)) + ".json"
    (fixture.cache / "machine" / name / "x").mkdir(parents=True)
    assert fixture.facts().canary == "ok"
    assert [file.name for file in fixture.kept] == [name]


def test_concurrent_first_uses_do_no_harm(fixture: Fixture) -> None:
    expected = fixture.facts()
    (file,) = fixture.kept
    file.unlink()
    found: list[MachineFacts] = []
    threads = [threading.Thread(target=lambda: found.append(fixture.facts())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3
    assert fixture.kept == [file]


def test_the_key_changes_with_build_processor_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "llama_cpp/lib/libggml-cpu.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"1234")
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.parent.mkdir()
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: 2000\nflags\t\t: sse avx\n\nprocessor\t: 1\n")
    build = InstalledLlama("edgelm-llama", "1", library.parent)
    monkeypatch.setattr(machine, "find_build", lambda: build)
    keys = [machine_key(Cores(2, 2), tmp_path)]

    def changed() -> bool:
        keys.append(machine_key(Cores(2, 2), tmp_path))
        return keys[-1] != keys[-2]

    assert not changed()
    cpuinfo.write_text(cpuinfo.read_text().replace("2000", "2100").replace(": 1", ": 2"))
    assert not changed()
    cpuinfo.write_text(cpuinfo.read_text().replace("avx", "avx amx_int8"))
    assert changed()
    library.write_bytes(b"12345")
    assert changed()
    os.utime(library, ns=(1, 1))
    assert changed()
    library.with_name("libggml-metal.so").touch()
    assert changed()
    assert machine_key(Cores(1, 2), tmp_path) != keys[-1]
    monkeypatch.setenv("EDGELM_NO_AMX", "1")
    assert changed()
    build = replace(build, version="2")
    assert changed()


def test_macs_of_different_processors_have_different_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder moves from one to the next, and Python names all of them arm."""
    monkeypatch.setattr(machine, "find_build", lambda: InstalledLlama("edgelm-llama", "1", tmp_path))
    keys = set()
    for brand in ("Apple M1", "Apple M2", "Apple M2"):
        monkeypatch.setattr(machine, "sysctl_text", {"machdep.cpu.brand_string": brand}.__getitem__)
        keys.add(machine_key(Cores(4, 8), tmp_path))
    assert len(keys) == 2


def test_nothing_native_is_imported_by_the_parent() -> None:
    code = "import sys, edgelm.base.machine.facts, edgelm.base.machine.memory; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"numpy", "gguf", "llama_cpp", "torch"} & set(done.stdout.split())


def test_crash_signals_have_names() -> None:
    assert {signal.SIGSEGV, signal.SIGILL, signal.SIGABRT} <= set(machine.CRASHES)
    assert signal.SIGKILL not in machine.CRASHES
