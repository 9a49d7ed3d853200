"""A pull from a correct server: the cache afterwards, its cost in requests, and other tools that use it."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from gguf.constants import GGUFValueType as V

from edgelm.base import disk
from edgelm.base.errors import EdgeLMError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.library import hub_cache
from edgelm.library.http_range import CancelledTransferError, fetch_headers
from edgelm.library.hub import Hub, RetryPolicy
from edgelm.library.local import find_local
from edgelm.library.names import HubReference
from edgelm.library.progress import Fetched, Listed, Progress, Pulled, Retrying, Waiting, Wrong
from edgelm.library.projectors import heads_of
from edgelm.library.pull import prepare, pull
from edgelm.library.scan import scan
from tests.checkpoints.gguf_bytes import RawGGUF, RawTensor
from tests.library.conftest import QUICK, Puller, wait_for_part
from tests.library.hub_server import Fault, HubServer

SIZE = 3_000_000
NAME = "o/m-GGUF"
FILE = "m-Q4_K_M.gguf"
LLAMA = b'{"model_type": "llama"}'


def random_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def content(server: HubServer) -> bytes:
    data = random_bytes(SIZE)
    server.add(NAME, {FILE: data, "m-Q8_0.gguf": data * 2, "README.md": b"text"})
    return data


def test_other_tools_find_the_model(server: HubServer, puller: Puller, content: bytes) -> None:
    path = puller.pull(NAME)
    assert path.read_bytes() == content
    cached = huggingface_hub.hf_hub_download(NAME, FILE, cache_dir=puller.cache, local_files_only=True)
    assert Path(cached) == path
    assert find_local(NAME, puller.cache).path == path
    info = huggingface_hub.scan_cache_dir(puller.cache)
    assert [repo.repo_id for repo in info.repos] == [NAME]
    assert not info.warnings
    assert puller.parts() == []


def test_the_layout_is_the_clients_own(server: HubServer, puller: Puller, content: bytes, tmp_path: Path) -> None:
    """The same files, links and refs as the client makes, beside our lock files."""

    def tree(root: Path) -> dict[str, str]:
        paths = sorted(path for path in root.rglob("*") if not path.is_dir() or path.is_symlink())
        return {
            path.relative_to(root).as_posix(): str(path.readlink()) if path.is_symlink() else str(path.stat().st_size)
            for path in paths
            if path.name != hub_cache.CACHE_TAG
        }

    puller.pull(NAME)
    theirs = tmp_path / "theirs"
    huggingface_hub.hf_hub_download(NAME, FILE, cache_dir=theirs, endpoint=server.url)
    assert tree(puller.cache) == tree(theirs)
    assert (puller.cache / hub_cache.CACHE_TAG).read_text()[:43] == (theirs / hub_cache.CACHE_TAG).read_text()[:43]


def test_a_complete_model_costs_one_metadata_request(server: HubServer, puller: Puller, content: bytes) -> None:
    puller.pull(NAME)
    before = len(server.requests)
    puller.pull(NAME)
    assert len(server.requests) - before == 1
    assert server.metadata_requests() == 2
    assert server.sent_bytes() == SIZE


def test_a_model_of_another_tool_is_not_fetched_again(server: HubServer, puller: Puller, content: bytes) -> None:
    huggingface_hub.hf_hub_download(NAME, FILE, cache_dir=puller.cache, endpoint=server.url)
    before = server.sent_bytes()
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent_bytes() == before


def test_the_same_bytes_in_another_commit_are_linked(server: HubServer, puller: Puller, content: bytes) -> None:
    puller.pull(NAME)
    repo = server.repos[NAME]
    repo.commit = repo.revisions["main"] = "d" * 40
    assert puller.pull(NAME).parent.name == "d" * 40
    assert server.sent_bytes() == SIZE
    assert (puller.cache / "models--o--m-GGUF/refs/main").read_text() == "d" * 40


def test_a_revision_is_pulled_and_becomes_its_own_ref(server: HubServer, puller: Puller, content: bytes) -> None:
    server.repos[NAME].revisions["refs/pr/3"] = "e" * 40
    server.repos[NAME].revisions["e" * 40] = "e" * 40
    assert puller.pull(NAME, revision="refs/pr/3").parent.name == "e" * 40
    assert (puller.cache / "models--o--m-GGUF/refs/refs/pr/3").read_text() == "e" * 40
    puller.pull(NAME, revision="c" * 40)
    assert not (puller.cache / "models--o--m-GGUF/refs" / ("c" * 40)).exists()


def test_the_branch_moves_only_when_the_model_is_whole(server: HubServer, puller: Puller, content: bytes) -> None:
    """A user who works offline meanwhile still has the old one."""
    puller.pull(NAME)
    server.add(NAME, {FILE: random_bytes(SIZE, 2)}, commit="d" * 40)
    server.order(FILE, Fault("close", 1000), Fault("status", status=500, times=9))
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    assert (puller.cache / "models--o--m-GGUF/refs/main").read_text() == "c" * 40


def test_a_split_model_is_pulled_whole(server: HubServer, puller: Puller) -> None:
    parts = {f"q8/m-Q8_0-{i:05d}-of-00003.gguf": random_bytes(50_000, i) for i in (1, 2, 3)}
    server.add(NAME, {**parts, FILE: b"x" * 5000})
    path = puller.pull(NAME, "Q8_0")
    assert path.name == "m-Q8_0-00001-of-00003.gguf"
    assert [path.with_name(name[3:]).read_bytes() for name in parts] == list(parts.values())


def test_transformers_loads_a_pulled_folder_offline(
    server: HubServer, puller: Puller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from huggingface_hub import constants
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "t.json"))
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    server.add(
        "o/m",
        {
            "config.json": json.dumps(config).encode(),
            "tokenizer.json": (tmp_path / "t.json").read_bytes(),
            "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
            "model-00001-of-00002.safetensors": random_bytes(40_000),
            "model-00002-of-00002.safetensors": random_bytes(50_000, 2),
            "model.safetensors.index.json": b"{}",
            "pytorch_model.bin": random_bytes(90_000),
            "original/consolidated.00.pth": random_bytes(90_000),
        },
    )
    folder = puller.pull("o/m")
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tokenizer = transformers.AutoTokenizer.from_pretrained("o/m", cache_dir=puller.cache)
    assert tokenizer("hello world")["input_ids"] == [0, 1]
    assert transformers.AutoConfig.from_pretrained("o/m", cache_dir=puller.cache).hidden_size == 8
    assert find_local("o/m", puller.cache).path == folder


def test_a_bert_comes_with_its_pooling_and_other_encoders_are_refused(server: HubServer, puller: Puller) -> None:
    files = {"tokenizer.json": b"{}", "model.safetensors": b"x" * 5000, "1_Pooling/config.json": b"{}"}
    others = {"modules.json": b"[]", "2_Dense/config.json": b"{}", "onnx/model.onnx": b"x", "data_config.json": b"[]"}
    server.add("o/minilm", {"config.json": b'{"model_type": "bert"}', **files, **others})
    folder = puller.pull("o/minilm")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", *files, "modules.json", "2_Dense/config.json"}
    for name, config, reason in (
        ("o/relu", b'{"model_type": "bert", "hidden_act": "relu"}', "its activation is"),
        ("o/xlm", b'{"model_type": "xlm-roberta"}', "is a xlm-roberta model"),
    ):
        server.add(name, {"config.json": config, **files})
        with pytest.raises(EdgeLMError, match=reason):
            puller.pull(name)


def test_small_and_empty_files_are_checked_by_gits_hash(server: HubServer, puller: Puller) -> None:
    server.add("o/m", {"config.json": LLAMA, "merges.txt": b"", "model.safetensors": b"x" * 5000})
    folder = puller.pull("o/m")
    assert (folder / "merges.txt").read_bytes() == b""
    assert (folder / "config.json").resolve().name == server.repos["o/m"].files["config.json"].blob


def test_progress_never_runs_backwards_and_ends_at_the_total(server: HubServer, puller: Puller, content: bytes) -> None:
    server.rate = 6e6
    puller.pull(NAME)
    events = puller.events_of(Progress)
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert (events[-1].done, events[-1].total, events[-1].files_done) == (SIZE, SIZE, 1)
    assert any(event.rate > 0 and event.seconds_left for event in events[1:-1])
    assert isinstance(puller.events[0], Listed)
    assert isinstance(puller.events[-1], Pulled)


def test_parallel_downloads_never_exceed_the_connections(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {f"m-Q8_0-{i:05d}-of-00006.gguf": random_bytes(200_000, i) for i in range(1, 7)}
    server.add(NAME, dict(parts))
    server.rate = 1e6
    busy: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            busy.append(sum(0 < sent.count < 200_000 for sent in list(server.sent)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    pull(HubReference(NAME), Hub(server.url, cache, QUICK), lambda _: None, connections=3)
    done.set()
    watcher.join()
    assert max(busy) == 3


def test_a_full_disk_is_noticed_before_the_download(
    server: HubServer, puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": SIZE})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EdgeLMError, match=r"needs 3\.00 MB more, .* has 3\.00 MB free; free some space"):
        puller.pull(NAME)
    assert server.sent == []


def test_cancelling_keeps_the_downloaded_part(server: HubServer, cache: Path, content: bytes) -> None:
    server.order(FILE, Fault("stall", after=500_000))
    puller = Puller(server, cache, RetryPolicy())
    errors: list[BaseException] = []

    def run() -> None:
        try:
            puller.pull(NAME)
        except CancelledTransferError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_part(cache, 500_000)
    begun = time.monotonic()
    puller.cancelled.set()
    thread.join()
    assert errors
    assert time.monotonic() - begun < 30
    assert puller.parts()[0].stat().st_size == 500_000
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent[-1].start == 500_000


def test_two_pulls_at_once_fetch_each_byte_once(server: HubServer, cache: Path) -> None:
    parts = {f"m-Q8_0-{i:05d}-of-00004.gguf": random_bytes(300_000, i) for i in range(1, 5)}
    server.add(NAME, dict(parts))
    server.rate = 1e6
    pullers = [Puller(server, cache) for _ in range(2)]
    threads = [threading.Thread(target=puller.pull, args=(NAME,)) for puller in pullers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.sent_bytes() == 4 * 300_000
    assert any(puller.events_of(Waiting) for puller in pullers)
    for puller in pullers:
        pulled = puller.events_of(Pulled)[0]
        assert isinstance(pulled, Pulled)
        assert [pulled.path.with_name(name).read_bytes() for name in parts] == list(parts.values())
        assert len(puller.events_of(Fetched)) == 4


def test_the_client_waits_for_our_lock_and_finds_the_file(server: HubServer, puller: Puller, content: bytes) -> None:
    server.rate = 2e6
    thread = threading.Thread(target=puller.pull, args=(NAME,))
    thread.start()
    server.wait_for_bytes(100_000)
    theirs = huggingface_hub.hf_hub_download(NAME, FILE, cache_dir=puller.cache, endpoint=server.url)
    thread.join()
    assert Path(theirs).read_bytes() == content
    assert server.sent_bytes() == SIZE


def test_a_header_is_read_without_the_rest_of_the_file(server: HubServer, puller: Puller, tmp_path: Path) -> None:
    tokens = [f"token {number:>40}" for number in range(60_000)]
    keys = {"general.architecture": (V.STRING, "llama"), "tokenizer.ggml.tokens": (V.ARRAY, (V.STRING, tokens))}
    whole = RawGGUF(keys, [RawTensor("weights", (4, 3_000_000), data=bytes(48_000_000))]).to_bytes()
    server.add(NAME, {FILE: whole})
    prepared = prepare(HubReference(NAME), puller.hub)
    (tmp_path / "heads").mkdir()
    with open_gguf(fetch_headers(puller.hub, prepared.listing, prepared.files, tmp_path / "heads")) as gguf:
        assert gguf.architecture == "llama"
        assert gguf.size == len(whole)
    assert [(sent.start, sent.end) for sent in server.sent] == [(0, 2**20), (2**20, 2**21), (2**21, 2**22)]
    assert not puller.cache.exists()


def test_a_login_goes_to_the_hub_and_nowhere_else(
    server: HubServer, puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    server.repos[NAME].gated = server.repos[NAME].private = True
    puller.pull(NAME)
    assert {login for _, _, login in server.requests} == {"Bearer hf_right"}
    assert [sent.login for sent in server.sent] == [None]  # the other host


def test_proxies_of_the_environment_are_used(
    server: HubServer, puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's address exists only behind the proxy, which here is the server itself."""
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.utils._http.close_session()
    try:
        hub = Hub("http://hub.invalid", puller.cache, QUICK)
        pulled = pull(HubReference(NAME), hub, lambda _: None)
    finally:
        huggingface_hub.utils._http.close_session()
    assert pulled.path.read_bytes() == content


@pytest.mark.parametrize("path", ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a\\..\\x.gguf", "x\n.gguf"])
def test_a_server_cannot_write_outside_the_cache(server: HubServer, puller: Puller, path: str) -> None:
    server.add(NAME, {path: b"x" * 5000})
    with pytest.raises(EdgeLMError, match=r"does not answer like a hub|has no model"):
        puller.pull(NAME)
    assert not puller.cache.exists()


@pytest.mark.parametrize("path", ["\u56fe\u3000\u7247.png", "docs\\read me.md", "a\x1bb"])
def test_a_file_with_an_odd_name_does_not_block_the_model(
    server: HubServer, puller: Puller, content: bytes, path: str
) -> None:
    server.add(NAME, {FILE: content, path: b"x"})
    assert puller.pull(NAME).read_bytes() == content


def test_a_faulty_pull_sends_all_kinds_of_events(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("flip", 100), Fault("close", 1000))
    puller.pull(NAME)
    assert {type(event) for event in puller.events} >= {Listed, Progress, Wrong, Retrying, Fetched}


def test_a_projector_comes_with_its_model(server: HubServer, puller: Puller) -> None:
    eyes = random_bytes(2000, 2)
    projectors = {"mmproj-F16.gguf": eyes, "mmproj-BF16.gguf": eyes[::-1], "mmproj-Q8_0.gguf": eyes[:900]}
    server.add(NAME, {FILE: random_bytes(3000), **projectors})
    hub = Hub(server.url, puller.cache)
    alone = pull(HubReference(NAME), hub, lambda _: None, mmproj=False)
    assert find_local(NAME, puller.cache).projector is None
    both = pull(HubReference(NAME), hub, lambda _: None)
    assert (both.path, both.nbytes, both.fetched) == (alone.path, 5000, 2000)
    found = find_local(NAME, puller.cache)
    assert found.projector is not None
    assert found.projector.read_bytes() == eyes
    assert not list(puller.cache.rglob("mmproj-BF16.gguf"))


def test_the_heads_that_draft_come_with_their_model(server: HubServer, puller: Puller) -> None:
    """The file has a quantization in its name, but is no model that the label could mean."""
    heads = {"mtp-model-Q8_0.gguf": random_bytes(2000, 2), "mtp-model-BF16.gguf": random_bytes(2500, 3)}
    server.add(NAME, {"model-Q8_0.gguf": random_bytes(3000), **heads, "eagle3-model-Q8_0.gguf": random_bytes(100)})
    hub = Hub(server.url, puller.cache)
    alone = pull(HubReference(NAME, "Q8_0"), hub, lambda _: None, mtp=False)
    assert (alone.path.name, alone.nbytes) == ("model-Q8_0.gguf", 3000)
    both = pull(HubReference(NAME, "Q8_0"), hub, lambda _: None)
    assert (both.path, both.nbytes, both.fetched) == (alone.path, 5000, 2000)
    assert heads_of(both.path) == both.path.with_name("mtp-model-Q8_0.gguf")
    (found,) = (model for model in scan(puller.cache).models if model.place == "hub")
    assert [file.name for file in found.all_files] == ["model-Q8_0.gguf", "mtp-model-Q8_0.gguf"]


def test_an_unfinished_projector_is_resumed_by_its_models_name(server: HubServer, puller: Puller) -> None:
    server.add(NAME, {FILE: random_bytes(3000), "mmproj-F16.gguf": random_bytes(SIZE, 2)})
    server.order("mmproj-F16.gguf", Fault("close", 700_000), Fault("status", status=500, times=9))
    with pytest.raises(EdgeLMError, match="HTTP 500"):
        puller.pull(NAME, "Q4_K_M")
    (part,) = hub_cache.unfinished_of(HubReference(NAME, "Q4_K_M"), puller.cache)
    assert part.file == "mmproj-F16.gguf"
    assert part.name == f"{NAME}:Q4_K_M"
    assert hub_cache.unfinished_of(HubReference(NAME, "Q8_0"), puller.cache) == []
