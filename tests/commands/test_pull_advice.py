"""The advice about unfinished and damaged downloads is tried: it does what it says, and other tools lose nothing."""

from __future__ import annotations

import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf.constants import GGUFValueType as V
from huggingface_hub import scan_cache_dir
from huggingface_hub.cli.cache import prune

from edgelm.base.errors import EdgeLMError
from edgelm.commands.cli import run_cli
from tests.checkpoints.gguf_bytes import RawGGUF, RawTensor
from tests.library.conftest import Puller
from tests.library.hub_server import Fault, HubServer

NAME = "o/m-GGUF"
FILE = "m-Q4_K_M.gguf"
SHARDS = [f"m-Q8_0-{i:05d}-of-00002.gguf" for i in (1, 2)]
BROKEN = (Fault("close", 200_000), Fault("status", status=503, times=9))


def data(seed: int) -> bytes:
    return random.Random(seed).randbytes(500_000)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        running.add(NAME, {FILE: data(1), SHARDS[0]: data(2), SHARDS[1]: data(3)})
        yield running


@pytest.fixture
def puller(server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> Puller:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    return Puller(server, home / "hub")


def run(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["edgelm", *arguments])
        return run_cli()


def break_off(server: HubServer, puller: Puller, file: str, *more: str, **revision: str) -> None:
    server.order(file, *(Fault(fault.kind, fault.after, fault.times, fault.status) for fault in BROKEN))
    with pytest.raises(EdgeLMError, match="cannot be downloaded"):
        puller.pull(NAME, *more, **revision)
    server.faults.clear()


def advice(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the commands that `edgelm list` advises for unfinished downloads."""
    capsys.readouterr()
    assert run("list") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("not finished")]
    return [shlex.split(command)[1:] for line in lines for command in re.findall(r"`([^`]+)`", line)]


def files(puller: Puller) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in puller.cache.glob("*/snapshots/*/*")}


@pytest.mark.parametrize("command", [0, 1], ids=["pull", "rm"])
@pytest.mark.parametrize("case", ["nothing else", "another model", "an older version", "a newer version", "a revision"])
def test_the_advice_ends_an_unfinished_download(
    server: HubServer, puller: Puller, capsys: pytest.CaptureFixture[str], case: str, command: int
) -> None:
    repo = server.repos[NAME]
    if case == "another model":
        puller.pull(NAME, "Q8_0")
    if case == "a newer version":
        puller.pull(NAME)
        server.add(NAME, {FILE: data(9)}, commit="d" * 40)
    repo.revisions["old"] = repo.commit
    break_off(server, puller, FILE, **({"revision": "old"} if case == "a revision" else {}))
    if case == "an older version":
        server.add(NAME, {FILE: data(9)}, commit="d" * 40)
        puller.pull(NAME, file=FILE)
        assert puller.parts() == [], "the pull removes the part of the file that it replaces"
        assert advice(capsys) == []
        return
    if case == "a revision":  # the old one is asked for, after a pull of the new one
        server.add(NAME, {FILE: data(9)}, commit="d" * 40)
        puller.pull(NAME)
        server.repos[NAME] = repo
    before = files(puller)
    commands = advice(capsys)
    assert [arguments[0] for arguments in commands] == ["pull", "rm"]
    assert run(*commands[command], *(["--yes"] if command else [])) == 0, capsys.readouterr()
    assert advice(capsys) == []
    assert puller.parts() == []
    for name, content in files(puller).items():
        assert content in (before.get(name), data(9), server.repos[NAME].files[name].content)
    assert set(files(puller)) >= set(before), "no complete model is removed"
    if case != "nothing else" or command == 0:
        assert not scan_cache_dir(puller.cache).warnings


def test_rm_of_unfinished_downloads_alone_needs_one(puller: Puller, capsys: pytest.CaptureFixture[str]) -> None:
    puller.pull(NAME)
    assert run("rm", "--unfinished", NAME, "--yes") == 1
    assert f"{NAME} has no unfinished download; `edgelm list` shows them" in capsys.readouterr().err
    assert files(puller) == {FILE: data(1)}


@pytest.mark.parametrize("as_json", [False, True])
def test_verify_replaces_a_damaged_file(
    server: HubServer, puller: Puller, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    path = puller.pull(NAME, "Q8_0").with_name(SHARDS[1])
    damaged = bytearray(data(3))
    damaged[400_000] ^= 1
    path.write_bytes(damaged)
    arguments = ["pull", f"{NAME}:Q8_0", *(["--json"] if as_json else [])]
    assert run(*arguments) == 0
    assert path.read_bytes() == damaged, "without --verify, a pull trusts a file of the right size"
    capsys.readouterr()
    assert run(*arguments, "--verify") == 0
    assert f"{SHARDS[1]}: wrong checksum; downloading it again" in capsys.readouterr().err
    assert path.read_bytes() == data(3)
    assert server.sent_bytes(SHARDS[0]) == 500_000
    assert run(*arguments, "--verify") == 0
    assert as_json or "already complete: 1.00 MB, all checksums are right" in capsys.readouterr().err


def test_verify_without_the_hub_is_refused(puller: Puller, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", NAME, "--verify", "--offline") == 1
    assert "--verify asks the hub for the checksums; omit --offline" in capsys.readouterr().err


@pytest.mark.parametrize("file", [FILE, SHARDS[1]])
def test_hf_cache_prune_keeps_an_unfinished_pull(server: HubServer, puller: Puller, file: str) -> None:
    """The hub's own command deletes every revision without a ref."""
    quantization = "Q4_K_M" if file == FILE else "Q8_0"
    break_off(server, puller, file, quantization)
    before = server.sent_bytes()
    assert not scan_cache_dir(puller.cache).warnings, "other tools can read the cache meanwhile"
    prune(cache_dir=str(puller.cache), yes=True)
    puller.pull(NAME, quantization)
    total = 500_000 if file == FILE else 1_000_000
    assert server.sent_bytes() == total >= before > 0
    assert [ref.name for ref in puller.cache.glob("*/refs/*")] == ["main"]
    assert not scan_cache_dir(puller.cache).warnings


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_preview_says_that_nothing_can_run_a_model(
    server: HubServer, puller: Puller, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "gguf":
        tensors = [RawTensor("weights", (4, 4), data=bytes(64))]
        head = RawGGUF({"general.architecture": (V.STRING, "flux")}, tensors).to_bytes()
        server.add("o/x", {FILE: head})
        assert run("pull", "o/x", "--dry-run") == 0
        assert "memory: not known: o/x has the architecture flux, which llama.cpp here" in capsys.readouterr().out
    else:
        server.add("o/x", {"config.json": b'{"model_type": "whisper"}', "model.safetensors": b"x" * 5000})
        assert run("pull", "o/x", "--dry-run") == 1
        assert "o/x is a whisper model" in capsys.readouterr().err
    assert not puller.cache.exists()
