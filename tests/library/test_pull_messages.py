"""What a pull says where the hub, the network or the repository is not as expected: one line, with the way out."""

from __future__ import annotations

import json
import random
from types import ModuleType

import pytest
from gguf.constants import GGUFValueType as V

from edgelm.base.errors import EdgeLMError
from edgelm.library import http_range, hub
from edgelm.library.hub import within
from edgelm.library.progress import Listed
from edgelm.library.runnable import HEAD_BYTES
from tests.checkpoints.gguf_bytes import RawGGUF
from tests.library.conftest import Puller
from tests.library.hub_server import Fault, HubServer

NAME = "o/m-GGUF"
FILE = "m-Q4_K_M.gguf"
SIZE = 200_000


@pytest.fixture
def content(server: HubServer) -> bytes:
    data = random.Random(1).randbytes(SIZE)
    server.add(NAME, {FILE: data})
    return data


def refusal(puller: Puller, name: str = NAME) -> str:
    with pytest.raises(EdgeLMError) as caught:
        puller.pull(name)
    text = str(caught.value)
    assert text.isprintable()
    return text


@pytest.mark.parametrize("module", [hub, http_range], ids=["the hub", "a file"])
def test_headers_that_never_end_are_given_up(
    server: HubServer, puller: Puller, content: bytes, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hasty:  # for the answers that drip alone: an honest one may be late on a busy machine
        hasty.setattr(module, "within", lambda _, *rest: within(0.3, *rest))
        if module is hub:
            server.api_faults = [Fault("headers") for _ in range(9)]
            assert "cannot be reached: the answer timed out" in refusal(puller)
        else:
            server.order(FILE, Fault("headers", times=9))
            assert f"{FILE} cannot be downloaded from" in refusal(puller)
    server.api_faults, server.faults = [], {}
    assert puller.pull(NAME).read_bytes() == content


@pytest.mark.parametrize("where", ["the hub", "a file"])
def test_the_login_page_of_a_network_is_named(server: HubServer, puller: Puller, content: bytes, where: str) -> None:
    if where == "the hub":
        server.api_faults = [Fault("page")]
        message = refusal(puller)
        assert message.startswith("a web page came in place of an answer of 127.0.0.1")
        assert "log in to the network" in message
    else:
        server.order(FILE, Fault("page", times=9))
        assert "a web page came in place of the file" in refusal(puller)
        assert puller.parts() == []
    server.faults = {}
    assert puller.pull(NAME).read_bytes() == content


def test_a_network_that_asks_for_a_login_by_its_status(server: HubServer, puller: Puller, content: bytes) -> None:
    server.api_faults = [Fault("status", status=511)]
    assert "log in to the network" in refusal(puller)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "GatedRepo", "o/m-GGUF is gated, and your token has no access to it; accept its licence at http"),
        (
            403,
            "",
            "does not show o/m-GGUF to the user of your token (HTTP 403); check the name, and that the token may",
        ),
        (404, "RepoNotFound", "does not show o/m-GGUF to the user of your token (HTTP 404); check the name"),
    ],
)
def test_a_token_without_access_is_not_asked_for_again(
    server: HubServer, puller: Puller, monkeypatch: pytest.MonkeyPatch, status: int, code: str, expected: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    server.api_faults = [Fault("status", status=status, headers={"X-Error-Code": code} if code else {})]
    message = refusal(puller)
    assert expected in message
    assert "log in" not in message


def test_a_renamed_repository_is_pulled_and_named(server: HubServer, puller: Puller, content: bytes) -> None:
    server.renamed = {"old/m-GGUF": NAME}
    path = puller.pull("old/m-GGUF")
    assert path.read_bytes() == content
    assert "models--old--m-GGUF" in path.parts, "as other tools look for it"
    (listed,) = puller.events_of(Listed)
    assert isinstance(listed, Listed)
    assert (listed.repository, listed.new_name) == ("old/m-GGUF", NAME)


@pytest.mark.parametrize("files", [{FILE: b""}, {"config.json": b"{}", "model.safetensors": b""}])
def test_a_file_without_bytes_is_refused(server: HubServer, puller: Puller, files: dict[str, bytes]) -> None:
    server.add(NAME, dict(files))
    assert "has no bytes; its upload failed: choose another file or repository" in refusal(puller)
    assert not puller.cache.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.pth"])
def test_pickled_weights_are_named(server: HubServer, puller: Puller, name: str) -> None:
    server.add(NAME, {name: b"x" * 5000, "config.json": b"{}", "README.md": b"text"})
    hint = "choose a repository with the model as safetensors or GGUF"
    assert refusal(puller) == f"{NAME} has only pickled weights ({name}), which can run code; {hint}"


def test_an_adapter_is_pulled(server: HubServer, puller: Puller) -> None:
    config = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "o/m"}).encode()
    files = {"adapter_config.json": config, "adapter_model.safetensors": b"x" * 5000, "README.md": b"text"}
    server.add("o/lora", {**files, "checkpoint-10/adapter_model.safetensors": b"y" * 5000, "training_args.bin": b"z"})
    folder = puller.pull("o/lora")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


# -- models that nothing can run ------------------------------------------------------------------------------------


def gguf(architecture: str, size: int) -> bytes:
    keys = {"general.name": (V.STRING, "A"), "general.tags": (V.ARRAY, (V.STRING, ["a", "b"]))}
    keys |= {"general.architecture": (V.STRING, architecture)}
    return RawGGUF(keys).to_bytes().ljust(size, b"\0")


@pytest.mark.parametrize("shards", [1, 3])
def test_an_unknown_architecture_is_refused_by_its_first_bytes(
    server: HubServer, puller: Puller, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 400_000
    names = [f"m-Q4_0-{i:05d}-of-{shards:05d}.gguf" for i in range(1, shards + 1)] if shards > 1 else [FILE]
    server.add(NAME, {name: gguf("flux", size) for name in names})
    server.order(names[0], *(Fault("stall", after=2 * HEAD_BYTES) for _ in range(9)))  # so no more than that is needed
    message = refusal(puller)
    assert message.startswith(f"{NAME} has the architecture flux, which llama.cpp here does not know; choose a GGUF")
    assert {sent.path for sent in server.sent} == {names[0]}
    assert not list(puller.cache.glob("models--*")), "nothing is left"


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3moe", "bert"])
def test_a_known_architecture_is_pulled(server: HubServer, puller: Puller, architecture: str) -> None:
    server.add(NAME, {FILE: gguf(architecture, 100_000)})
    assert puller.pull(NAME).stat().st_size == 100_000
    assert server.sent_bytes() == 100_000


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "whisper"}, "is a whisper model, which edgelm cannot run from safetensors"),
        ({"architectures": ["Nosuch"]}, "does not say what kind of model it is"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "its quantization method is bitsandbytes",
        ),
        ([], "is not an object"),
    ],
    ids=["whisper", "unknown", "bitsandbytes", "list"],
)
def test_a_folder_that_nothing_can_run_is_refused_before_its_weights(
    server: HubServer, puller: Puller, config: object, reason: str
) -> None:
    text = json.dumps(config).encode()
    server.add("o/m", {"config.json": text, "model.safetensors": b"x" * 100_000, "README.md": b"text"})
    message = refusal(puller, "o/m")
    assert reason in message
    assert "o/m" in message
    assert {sent.path for sent in server.sent} == {"config.json"}
    assert not puller.cache.exists()
    text = json.dumps({"model_type": "llama"}).encode()
    server.add("o/m", {"config.json": text, "model.safetensors": b"x" * 100_000})
    assert (puller.pull("o/m") / "model.safetensors").exists()
