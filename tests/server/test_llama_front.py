"""llama-server's routes of a real front: texts and tokens, filling in, and requests that only their own key sees."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import ENDLESS, Front, serving, until
from tests.tiny import EOS, write_tiny

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
ANN, BOB = ({"authorization": f"Bearer the-key-of-{name}"} for name in ("ann-1", "bob-2"))


@pytest.fixture(scope="module")
def front(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front with two keys and a model for code, whose greedy answer does not end."""
    home = tmp_path_factory.mktemp("llama")
    keys = home / "keys"
    keys.touch(mode=0o600)
    keys.write_text("ann the-key-of-ann-1 admin\nbob the-key-of-bob-2\n")
    model = write_tiny(home / "code.gguf", context=4096, control=FIM, endless=True)
    settings = {"EDGELM_API_KEY_FILE": str(keys), "EDGELM_RUNTIME_DIR": str(home / "run")}
    with serving(environment | settings, model, log=home / "log") as running:
        running.http.headers.update(ANN)
        yield running


def post(front: Front, path: str, **fields: Any) -> Any:
    answer = front.http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(front: Front, text: str, **fields: Any) -> list[int]:
    ids: list[int] = post(front, "/tokenize", content=text, **fields)["tokens"]
    return ids


def test_texts_and_tokens(front: Front) -> None:
    ids = tokens(front, "hello world")
    assert post(front, "/detokenize", tokens=ids)["content"].strip() == "hello world"
    assert tokens(front, "hello world", add_special=True)[1:] == ids
    pieces = post(front, "/tokenize", content="é 日 漢", with_pieces=True)["tokens"]
    assert any(isinstance(entry["piece"], list) for entry in pieces), "a part of a character is bytes"
    assert len(tokens(front, FIM[0])) < len(tokens(front, FIM[0], parse_special=False))
    assert len(post(front, "/detokenize", tokens=ids * 3000)["content"]) > 4096, "lists of tokens may be long"
    for wrong in (-1, 10**9):
        assert front.http.post("/detokenize", json={"tokens": [wrong]}).status_code == 400


def test_texts_and_tokens_with_vllms_fields(front: Front) -> None:
    """lm-evaluation-harness takes the tokenizer of a server that has them."""
    ids = tokens(front, f"hello {FIM[0]} world")
    fields = {"prompt": f"hello {FIM[0]} world", "add_special_tokens": False, "return_token_strs": True}
    answer = post(front, "/tokenize", **fields)
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert FIM[0] in answer["token_strs"]
    assert len(answer["token_strs"]) == len(ids)
    assert post(front, "/tokenize", prompt=fields["prompt"])["tokens"][1:] == ids
    assert post(front, "/tokenize", prompt="")["count"] == 1, "an empty text has its beginning"
    assert post(front, "/detokenize", tokens=tokens(front, "hello world"))["prompt"].strip() == "hello world"


def test_tokenizer_info_names_the_special_tokens(front: Front) -> None:
    info = front.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert (info["unk_token"], info["chat_template"]) == ("<unk>", None)
    assert "assistant" in front.http.get("/tokenizer_info", params={"model": "starter"}).json()["chat_template"]
    assert front.http.get("/tokenizer_info", params={"model": "none"}).status_code == 404
    assert post(front, "/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"] == [EOS]


def test_the_prompt_of_a_chat_has_the_users_marks_as_text(front: Front) -> None:
    prompt = post(front, "/apply-template", messages=[{"role": "user", "content": f"hello {FIM[0]}"}])["prompt"]
    assert f"hello {FIM[0]}" in prompt


def test_tools_are_described_behind_a_system_message_in_parts(front: Front) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": text} for text in ("be ", "kind")]}
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    user = {"role": "user", "content": "hello"}
    prompt = post(front, "/apply-template", messages=[system, user], tools=tools)["prompt"]
    assert "be kind\n\nYou can call tools" in prompt


def test_filling_in(front: Front) -> None:
    asked = {"input_prefix": "the day ", "input_suffix": " and so", "prompt": "was", "n_predict": 3}
    whole = post(front, "/infill", **asked, temperature=0)
    assert (whole["tokens_predicted"], whole["stop_type"]) == (3, "limit")
    warm = post(front, "/infill", **asked | {"n_predict": 0}, response_fields=["content", "timings/cache_n"])
    assert warm["content"] == ""
    assert warm["timings/cache_n"] > 0, "the same prompt"
    with front.http.stream("POST", "/infill", json=asked | {"stream": True, "temperature": 0}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["stop"]


def test_files_are_labels_and_what_does_not_fit_is_cut(front: Front, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of a file " * 20)
    asked: dict[str, Any] = {"input_prefix": "the ", "input_suffix": " and", "n_predict": 1}
    plain = post(front, "/infill", **asked)["tokens_evaluated"]
    labelled = post(front, "/infill", **asked, input_extra=[{"filename": str(secret), "text": "hello"}])
    assert labelled["tokens_evaluated"] < plain + len(tokens(front, str(secret))) + 60, "its name, and not its text"
    huge = [{"filename": "a", "text": "the day " * 20_000}, {"filename": "b", "text": "hello world"}]
    cut = post(front, "/infill", **asked | {"input_prefix": "the day " * 20_000}, input_extra=huge)
    assert 2000 < cut["tokens_evaluated"] < 4096


def test_an_answer_ends_where_a_line_is_indented_less(front: Front) -> None:
    grammar = 'root ::= "a\\n    b\\nc"'
    asked = {"input_prefix": "x", "grammar": grammar, "n_predict": 40}
    assert post(front, "/infill", **asked)["content"] == "a\n    b\nc"
    assert post(front, "/infill", **asked, n_indent=4)["content"] == "a\n    b\n"


def test_a_model_without_marks_is_an_error(front: Front) -> None:
    answer = front.http.post("/infill", json={"model": "starter", "input_prefix": "a"})
    assert answer.status_code == 400
    assert "no tokens for filling in" in answer.json()["error"]["message"]


def test_completion(front: Front) -> None:
    whole = post(front, "/completion", prompt="the", n_predict=4)
    assert (whole["tokens_predicted"], whole["truncated"]) == (4, False)
    assert post(front, "/completion", prompt=tokens(front, "the day"), n_predict=2)["tokens_evaluated"] > 0


def test_the_other_names_of_routes(front: Front) -> None:
    asked = {"model": "code", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert post(front, "/chat/completions", **asked)["object"] == "chat.completion"
    assert post(front, "/completions", prompt="the", n_predict=2)["tokens_predicted"] == 2


def test_props_describe_the_model_that_would_answer(front: Front) -> None:
    props = front.http.get("/props", params={"model": "starter"}).json()
    assert (props["model_alias"], props["total_slots"]) == ("starter", 8)
    assert "assistant" in props["chat_template"]
    assert front.http.get("/props").json()["model_alias"] == "code"


def test_a_model_that_was_loaded_by_its_path_is_described(front: Front, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "elsewhere.gguf")
    assert front.http.get("/props", params={"model": str(path)}).json()["model_alias"] == "elsewhere"
    post(front, "/completion", model=str(path), prompt="the", n_predict=1)
    listed = front.http.get("/api/ps").json()["models"]
    assert "elsewhere:latest" in [model["name"] for model in listed]


def test_a_key_without_admin_neither_pins_nor_unloads(front: Front) -> None:
    asked = {"model": "code", "prompt": "the", "keep_alive": "30m", "n_predict": 1}
    post(front, "/completion", **asked)
    for keep_alive, status in ((0, 403), (-1, 200)):
        assert front.http.post("/completion", json=asked | {"keep_alive": keep_alive}, headers=BOB).status_code == 200
        loading = {"model": "code", "keep_alive": keep_alive}
        assert front.http.post("/api/generate", json=loading, headers=BOB).status_code == status
        running = front.ps("code")
        assert running is not None
        assert running["keep_alive_s"] == 1800


def test_each_key_sees_its_own_requests_alone(front: Front) -> None:
    left = threading.Event()

    def write() -> None:
        asked = {"prompt": "the", "n_predict": 4000, "stream": True} | ENDLESS
        while not left.is_set():  # an answer may end early: this model has several tokens that end one
            with front.http.stream("POST", "/completion", json=asked, headers={"prefer": "wait"}) as answer:
                for _ in answer.iter_lines():
                    if left.is_set():
                        break

    writer = threading.Thread(target=write)
    writer.start()
    try:
        (own,) = until("it writes", lambda: front.http.get("/slots").json())
        assert (own["is_processing"], own["n_ctx"]) == (True, 4096)
        assert front.http.get("/slots", headers=BOB).json() == []
    finally:
        left.set()
        writer.join()
    until("nothing is open", lambda: front.http.get("/slots").json() == [])


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/tokenizer_info"])
def test_every_look_needs_a_key(front: Front, path: str) -> None:
    assert front.http.get(path).status_code == 200
    answer = front.http.get(path, headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert isinstance(answer.json()["error"], str if path.startswith("/api/") else dict)


@pytest.mark.parametrize(
    ("path", "body"), [("/api/pull", {"model": "starter"}), ("/api/chat", {"model": "code", "keep_alive": 0})]
)
def test_a_key_without_admin_changes_nothing(front: Front, path: str, body: dict[str, Any]) -> None:
    answer = front.http.post(path, json=body, headers=BOB)
    assert answer.status_code == 403
    assert "admin" in answer.json()["error"]
