"""`edgelm rm`: what it removes, keeps and refuses; the hub's own client accepts the remaining cache."""

from __future__ import annotations

import http.server
import io
import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir
from huggingface_hub.utils import WeakFileLock

from edgelm.base.errors import EdgeLMError
from edgelm.commands.rm import remove_models
from edgelm.library.removal import plan_removal, remove
from edgelm.library.scan import note_use, scan
from tests.counts import Count
from tests.library.hub_folders import FIRST, SECOND, THIRD, put, share

CACHES = Count(test=30, soak=3_000)
QWEN = "Qwen/Qwen3-4B-GGUF"
README = {"README.md": b"readme", ".gitattributes": b"*.gguf"}


@pytest.fixture
def hub(home: Path) -> Path:
    return home / "hub"


def rm(*names: str) -> None:
    assert remove_models(names, yes=True, as_json=False) == 0


def blobs(hub: Path) -> set[bytes]:
    """Return the bytes of all existing blobs."""
    return {path.read_bytes() for path in hub.glob("models--*/blobs/*") if path.exists()}


def names(hub: Path) -> set[str]:
    return {model.name for model in scan(hub).models if model.place == "hub"}


def check_sound(hub: Path) -> None:
    """Check with the hub's own client: no warnings, no link without its bytes."""
    info = scan_cache_dir(hub)
    assert info.warnings == []
    for repo in info.repos:
        for revision in repo.revisions:
            assert all(file.file_path.read_bytes() is not None for file in revision.files)


def test_only_the_named_model_is_removed(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(hub, QWEN, {"Qwen3-4B-Q4_K_M.gguf": b"a" * 1000, "Qwen3-4B-Q8_0.gguf": b"b"} | README)
    note_use(hub.parent / "data", next(hub.glob("models--*/snapshots/*/*Q4_K_M*")))
    rm("qwen3:4b")
    assert names(hub) == {"qwen3:4b:Q8_0"}
    assert blobs(hub) == {b"b", *README.values()}
    assert capsys.readouterr().out == "removed qwen3:4b: 1.00 kB freed\n"
    assert not list((hub.parent / "data" / "used").iterdir())
    check_sound(hub)


def test_the_last_model_removes_its_repository(hub: Path) -> None:
    put(hub, QWEN, {"Qwen3-4B-Q4_K_M.gguf": b"a", "Qwen3-4B-Q8_0.gguf": b"b", "mmproj-F16.gguf": b"m"} | README)
    put(hub, "own/m", {"m-Q8_0.gguf": b"c"})
    rm("qwen3:4b", "hf.co/Qwen/Qwen3-4B-GGUF:q8_0")
    assert [path.name for path in hub.glob("models--*")] == ["models--own--m"]
    assert names(hub) == {"own/m:Q8_0"}
    check_sound(hub)


def test_shards_are_removed_together(hub: Path) -> None:
    put(hub, "own/m", {f"m-Q8_0-{i:05d}-of-00002.gguf": bytes([i]) for i in (1, 2)} | {"m-Q4_0.gguf": b"x"})
    rm("own/m:Q8_0")
    assert blobs(hub) == {b"x"}


def test_the_same_bytes_in_another_revision_are_removed(hub: Path) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"same", "m-Q4_0.gguf": b"old"} | README, revision=FIRST, ref="v1")
    put(hub, "own/m", {"m-Q8_0.gguf": b"same", "m-Q4_0.gguf": b"new"} | README, revision=SECOND)
    rm("own/m:Q8_0")
    assert blobs(hub) == {b"old", b"new", *README.values()}
    rm("own/m:Q4_0")
    assert blobs(hub) == {b"old", *README.values()}, "another file of that name, in another revision"
    assert names(hub) == {"own/m:Q4_0"}
    check_sound(hub)


def test_a_revision_can_be_named(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"same"}, revision=FIRST, ref="v1")
    put(hub, "own/m", {"m-Q8_0.gguf": b"same"}, revision=SECOND)
    rm(f"own/m:Q8_0@{SECOND}")
    assert blobs(hub) == {b"same"}, "the other revision uses it"
    out = capsys.readouterr()
    assert "0 B freed" in out.out
    assert "use the bytes of m-Q8_0.gguf" in out.err
    check_sound(hub)


def test_the_same_bytes_under_another_name_are_kept(hub: Path) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"same", "other/copy-Q8_0.bin": b"same"})
    rm("own/m:Q8_0")
    assert blobs(hub) == {b"same"}
    check_sound(hub)


def test_files_of_another_tool_are_kept(hub: Path) -> None:
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"a", "onnx/model.onnx": b"onnx"} | README)
    rm("own/m:Q8_0")
    assert (snapshot / "onnx/model.onnx").read_bytes() == b"onnx"
    assert (snapshot / "README.md").exists()
    check_sound(hub)


def test_a_folder_of_safetensors(hub: Path) -> None:
    put(hub, "own/s", {"config.json": b"{}", "model.safetensors": b"w", "tokenizer.json": b"t"} | README)
    rm("own/s")
    assert not (hub / "models--own--s").exists()


def test_an_adapter(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(hub, "own/lora", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"} | README)
    rm("own/lora")
    assert "removed own/lora" in capsys.readouterr().out
    assert not (hub / "models--own--lora").exists()


def test_a_cache_without_links(hub: Path) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a", "m-Q4_0.gguf": b"b"} | README, links=False)
    rm("own/m:Q8_0")
    assert names(hub) == {"own/m:Q4_0"}
    rm("own/m:Q4_0")
    assert not (hub / "models--own--m").exists()


def test_what_macos_left_is_removed_with_the_last_model(hub: Path) -> None:
    snapshot = put(hub, QWEN, {"Qwen3-4B-Q4_K_M.gguf": b"a"} | README)
    repository = snapshot.parents[1]
    for folder in (repository, snapshot.parent, snapshot, repository / "blobs", repository / "refs"):
        (folder / ".DS_Store").write_bytes(b"Bud1")
    (snapshot / "._Qwen3-4B-Q4_K_M.gguf").write_bytes(b"\0\5\x16\7")
    (repository / "blobs" / "._0123.part").write_bytes(b"\0\5\x16\7")
    rm("qwen3:4b")
    assert not repository.exists()


def test_broken_links_do_not_block_it(hub: Path) -> None:
    """The hub client's own scan skips such a repository."""
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"a", "m-Q4_0.gguf": b"b"})
    (snapshot / "gone-Q2_K.gguf").symlink_to("../../blobs/gone")
    (hub / "models--own--m" / "refs" / "other").write_text(THIRD)
    rm("own/m:Q8_0")
    assert blobs(hub) == {b"b"}
    rm("own/m:Q4_0")
    assert blobs(hub) == set()


def test_bytes_that_repositories_share_are_freed_by_the_last(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = b"x" * 5000
    places = [put(hub, name, {"m-Q8_0.gguf": data}) / "m-Q8_0.gguf" for name in ("own/one", "own/two")]
    store = share(hub, data, *(Path(os.path.normpath(path.parent / path.readlink())) for path in places))
    assert [path.read_bytes() for path in places] == [data, data]
    assert names(hub) == {"own/one:Q8_0"}, "the same bytes are one model"
    rm("own/one:Q8_0")
    assert store.exists()
    assert "0 B freed" in capsys.readouterr().out
    assert names(hub) == {"own/two:Q8_0"}
    rm("own/two:Q8_0")
    assert not store.exists()
    assert "5.00 kB freed" in capsys.readouterr().out


# -- refusals --------------------------------------------------------------------------------------------------------


def refusal(*names: str) -> str:
    with pytest.raises(EdgeLMError) as caught:
        remove_models(names, yes=True, as_json=False)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_the_users_own_files_are_never_removed(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a"})
    mine = tmp_path / "mine" / "m.gguf"
    mine.parent.mkdir()
    mine.write_bytes(b"mine")
    monkeypatch.setenv("EDGELM_MODEL_DIRS", str(mine.parent))
    for name in (str(mine), "m"):
        message = refusal("own/m:Q8_0", name)
        assert "your own" in message
        assert str(mine) in message
    assert "part of edgelm" in refusal("starter")
    assert "edgelm pull qwen3:8b" in refusal("own/m:Q8_0", "qwen3:8b")
    assert mine.read_bytes() == b"mine"
    assert names(hub) == {"own/m:Q8_0"}, "nothing is removed where one of the names is wrong"


def test_a_link_out_of_the_cache_is_removed_and_the_file_kept(hub: Path, tmp_path: Path) -> None:
    snapshot = put(hub, "own/m", {"m-Q4_0.gguf": b"a"})
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"mine")
    (snapshot / "m-Q8_0.gguf").symlink_to(mine)
    rm("own/m:Q8_0")
    assert not (snapshot / "m-Q8_0.gguf").is_symlink()
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("linked", ["snapshots/" + FIRST, "snapshots", "blobs", "refs", "."])
def test_nothing_is_removed_through_a_folder_that_the_cache_links_to(hub: Path, tmp_path: Path, linked: str) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a", "README.md": b"r"}, links=linked == "blobs")
    inside, mine = hub / "models--own--m" / linked, tmp_path / "mine"
    inside.rename(mine)
    inside.symlink_to(mine, target_is_directory=True)
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    message = refusal("own/m:Q8_0")
    assert f"in {mine}" in message
    assert message.endswith("delete it there yourself")
    assert {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()} == before
    assert inside.is_symlink()
    assert names(hub) == {"own/m:Q8_0"}


def test_a_linked_revision_elsewhere_keeps_its_files(hub: Path, tmp_path: Path) -> None:
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"a"})
    mine = tmp_path / "mine" / "m-Q8_0.gguf"
    mine.parent.mkdir()
    mine.symlink_to((snapshot / "m-Q8_0.gguf").resolve())
    (snapshot.parent / SECOND).symlink_to(mine.parent, target_is_directory=True)
    rm("own/m:Q8_0")
    assert mine.is_symlink()


def test_a_path_in_the_cache_names_the_model_there(hub: Path) -> None:
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"a", "m-Q4_0.gguf": b"b"})
    rm(str(snapshot / "m-Q8_0.gguf"))
    assert names(hub) == {"own/m:Q4_0"}


def test_without_a_terminal_it_needs_yes(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a"})
    assert remove_models(["own/m:Q8_0"], yes=False, as_json=False) == 2
    assert capsys.readouterr().err == "error: rm asks for confirmation, which needs a terminal; add --yes\n"
    assert names(hub) == {"own/m:Q8_0"}


@pytest.mark.parametrize(
    ("answer", "left"), [("", {"own/m:Q8_0"}), ("n\n", {"own/m:Q8_0"}), ("y\n", set()), ("YES\n", set())]
)
def test_it_asks_on_a_terminal(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, left: set[str]
) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a" * 2_000_000})
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert remove_models(["own/m:Q8_0"], yes=False, as_json=False) == (1 if left else 0)
    assert "Remove own/m:Q8_0: frees 2.00 MB\n" in capsys.readouterr().err
    assert names(hub) == left


def test_json(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"abc"})
    assert remove_models(["own/m:Q8_0"], yes=True, as_json=True) == 0
    path = str(snapshot / "m-Q8_0.gguf")
    assert json.loads(capsys.readouterr().out) == {
        "removed": [{"name": "own/m:Q8_0", "path": path, "files": [path]}],
        "freed_bytes": 3,
        "unfinished": [],
    }


def test_a_file_in_download_is_kept(hub: Path) -> None:
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"a"})
    blob = (snapshot / "m-Q8_0.gguf").readlink().name
    locks = hub / ".locks" / "models--own--m"
    locks.mkdir(parents=True)
    with WeakFileLock(locks / f"{blob}.lock"):
        assert "being downloaded" in refusal("own/m:Q8_0")
    assert names(hub) == {"own/m:Q8_0"}


@contextmanager
def fake_front(runtime: Path, loaded: Path, **more: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"models": [{"path": str(loaded)}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    runtime.mkdir(exist_ok=True)
    address = f"http://127.0.0.1:{server.server_port}"
    (runtime / "front.json").write_text(json.dumps({"pid": os.getpid(), "address": address, **more}))
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


def test_a_loaded_model_is_kept(hub: Path) -> None:
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"a", "m-Q4_0.gguf": b"b"})
    with fake_front(hub.parent / "runtime", snapshot / "m-Q8_0.gguf"):
        assert f"loaded by the edgelm server (pid {os.getpid()}); edgelm unload own/m:Q8_0, or" in refusal("own/m:Q8_0")
        rm("own/m:Q4_0")
    with fake_front(hub.parent / "runtime", snapshot / "m-Q8_0.gguf", library="of another home") as address:
        assert refusal("own/m:Q8_0").endswith(f"; stop the server at {address}")
    rm("own/m:Q8_0")  # a stale record: no server answers
    assert names(hub) == set()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everything")
def test_a_missing_permission_is_one_line(hub: Path) -> None:
    snapshot = put(hub, "own/m", {"m-Q8_0.gguf": b"a", "m-Q4_0.gguf": b"b"})
    snapshot.chmod(0o500)
    try:
        assert "permissions" in refusal("own/m:Q8_0")
        assert blobs(hub) == {b"a", b"b"}
    finally:
        snapshot.chmod(0o700)


# -- any cache -------------------------------------------------------------------------------------------------------


def random_cache(hub: Path, rng: random.Random) -> None:
    files = [f"m-{kind}.gguf" for kind in ("Q8_0", "Q4_0", "Q4_K_M")] + ["d/m-F16.gguf", "README.md", "x.onnx"]
    for repository in rng.sample(["own/a", "own/b", QWEN], rng.randint(1, 3)):
        for revision in rng.sample([FIRST, SECOND, THIRD], rng.randint(1, 3)):
            chosen = {
                name: rng.choice([b"one", b"two", name.encode()]) for name in rng.sample(files, rng.randint(1, 5))
            }
            links = rng.random() < 0.9
            put(hub, repository, chosen, revision=revision, ref=rng.choice(["main", "v1", None]), links=links)


def links_of(hub: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in hub.glob("models--*/snapshots/*/**/*") if path.is_file()}


def disk(hub: Path) -> int:
    return sum(
        p.lstat().st_size
        for p in hub.glob("models--*/**/*")
        if p.is_file() and not p.is_symlink() and p.parent.name != "refs"
    )


def test_random_caches_lose_only_unused_bytes(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for i in range(CACHES):
        hub = tmp_path / str(i)
        random_cache(hub, rng)
        models = [model for model in scan(hub).models if model.place == "hub"]
        chosen = rng.sample(models, min(len(models), rng.randint(1, 2)))
        dated = {model.path for model in chosen if rng.random() < 0.3}
        before, size = links_of(hub), disk(hub)
        doomed = set().union(*(plan.links for plan in plan_removal(chosen, hub, dated=dated)))
        freed = remove(chosen, hub, dated=dated)
        after = links_of(hub)
        assert after == {path: data for path, data in before.items() if path not in doomed}, (i, seed)
        gone = [path for path in before if path not in after]
        weights = {path for path in gone if path.suffix in (".gguf", ".onnx")}
        assert weights <= {path for path in gone if path.suffix == ".gguf"}, (i, seed)
        assert all(before[path] in {before[model.path] for model in chosen} for path in weights), (i, seed)
        assert size - disk(hub) == freed, (i, seed)
        used = {os.path.realpath(path) for path in after}
        left = {os.path.realpath(path) for path in hub.glob("models--*/blobs/*")}
        assert left <= used, f"blobs that nobody uses: {i}, seed {seed}"
        check_sound(hub)
        for model in chosen:
            assert not os.path.lexists(model.path)


def test_a_projector_goes_with_the_last_model_that_uses_it(hub: Path) -> None:
    put(hub, QWEN, {"Qwen3-4B-Q4_K_M.gguf": b"a", "Qwen3-4B-Q8_0.gguf": b"b", "mmproj-F16.gguf": b"eyes"} | README)
    rm("qwen3:4b")
    assert b"eyes" in blobs(hub)
    rm("qwen3:4b:Q8_0")
    assert blobs(hub) == set()
