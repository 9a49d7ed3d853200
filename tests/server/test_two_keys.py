"""Two keys of one front: whatever one of them stored or computed is out of the other's reach."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgelm.engine.speculation.past_answers import AnswersFile
from edgelm.engine.speculation.throttle import CUT
from edgelm.server.keys import Key
from tests.server.harness import Front, serving, until, watching
from tests.server.test_serve import edgelm

STARTER = Path(__file__).resolve().parents[2] / "models" / "starter" / "starter.gguf"
pytestmark = pytest.mark.skipif(not STARTER.exists(), reason="the built-in model is not here")

ANN = Key("ann", "the-key-of-ann-1")
BOB = Key("bob", "the-key-of-bob-2", admin=True)
LONG = "Explain these words, one after the other. " + " ".join(
    f"word{number} and thing{number}." for number in range(60)
)


@pytest.fixture(scope="module")
def environment(environment: dict[str, str], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Places and caches of this module alone, with drafts, and a key file."""
    home = tmp_path_factory.mktemp("two")
    shutil.copytree(cache, home / "cache")
    keys = home / "keys"
    keys.touch(mode=0o600)
    keys.write_text("".join(f"{key.name} {key.secret}{' admin' * key.admin}\n" for key in (ANN, BOB)))
    places = {f"EDGELM_{kind}_DIR": str(home / kind.lower()) for kind in ("DATA", "RUNTIME", "CACHE")}
    return environment | places | {"EDGELM_SPEC": "4", "EDGELM_API_KEY_FILE": str(keys)}


@pytest.fixture(scope="module")
def front(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with serving(environment, "-v", log=tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def of(key: Key) -> dict[str, str]:
    return {"authorization": f"Bearer {key.secret}", "prefer": "wait"}


def chat(front: Front, key: Key, text: str, **fields: Any) -> dict[str, Any]:
    options = {"temperature": 0, "max_tokens": 8} | fields
    answer = front.chat("starter", text, headers=of(key), **options)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prefix_of_one_key_is_no_hit_for_the_other(front: Front) -> None:
    assert cached(chat(front, ANN, LONG)) == 0
    assert cached(chat(front, BOB, LONG)) == 0
    assert cached(chat(front, ANN, LONG)) > 100
    assert cached(chat(front, BOB, LONG)) > 100


def test_an_answer_to_one_key_drafts_for_that_key_alone(front: Front) -> None:
    question = "What is a key-value cache, and what is it good for?"

    def accepted(key: Key) -> int:
        return int(chat(front, key, question, max_tokens=80)["edgelm"]["speculation"]["accepted"])

    first, other = accepted(ANN), accepted(BOB)
    # Drafts pause while they cost time, as on a busy machine: one of the next answers has them, of 38 tokens each.
    assert any(accepted(ANN) > max(first, other) + 10 for _ in range(3 * CUT // 38))


def test_a_stored_response_of_another_key_does_not_exist(front: Front) -> None:
    body = {"model": "starter", "input": "Hello", "max_output_tokens": 16, "temperature": 0}
    made = front.http.post("/v1/responses", json=body, headers=of(ANN))
    assert made.status_code == 200, made.text
    name = made.json()["id"]
    for path in (f"/v1/responses/{name}", f"/v1/responses/{name}/input_items"):
        assert front.http.get(path, headers=of(BOB)).status_code == 404
        assert front.http.get(path, headers=of(ANN)).status_code == 200
    turn = body | {"previous_response_id": name}
    item = body | {"input": [{"type": "item_reference", "id": made.json()["output"][0]["id"]}]}
    for request in (turn, item):
        assert front.http.post("/v1/responses", json=request, headers=of(BOB)).status_code == 404
    assert front.http.delete(f"/v1/responses/{name}", headers=of(BOB)).status_code == 404
    assert front.http.post("/v1/responses", json=turn, headers=of(ANN)).status_code == 200
    assert front.http.delete(f"/v1/responses/{name}", headers=of(ANN)).status_code == 200


def test_a_namespace_in_a_request_means_nothing(front: Front) -> None:
    text = LONG + " And a last one."
    chat(front, ANN, text)
    headers = of(BOB) | {"x-edgelm-namespace": ANN.cache_namespace}
    answer = front.chat("starter", text, headers=headers, temperature=0).json()
    assert cached(answer) < cached(chat(front, ANN, text))


def test_the_users_own_commands_need_no_key_of_the_file(front: Front, environment: dict[str, str]) -> None:
    assert front.http.get("/edgelm/ps").status_code == 401
    done = edgelm(environment, "ps", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pid"] == front.process.pid
    own = json.loads((Path(environment["EDGELM_RUNTIME_DIR"]) / "front.json").read_text())["key"]
    port = front.address.rpartition(":")[2]
    taken = edgelm(environment, "serve", "--port", port)
    assert f"pid {front.process.pid}" in taken.stderr
    log = front.log.read_text()
    for key in (ANN, BOB):
        assert key.label in log
        assert key.secret not in log
    assert own not in log


def test_files_keep_the_keys_apart(environment: dict[str, str], tmp_path: Path) -> None:
    text = "Now in another order. " + LONG
    with serving(environment, log=tmp_path / "log") as first:
        chat(first, ANN, text)
        first.end()
    prompts = [
        row[0] for file in Path(environment["EDGELM_CACHE_DIR"]).rglob("*") for row in rows(file) if text in row[1]
    ]
    assert prompts == [ANN.cache_namespace], "the tokens of prompts"
    [answers] = Path(environment["EDGELM_DATA_DIR"], "memory").iterdir()
    assert AnswersFile(answers).read(ANN.cache_namespace)
    assert not AnswersFile(answers).read(Key("other", "of-nobody-at-all").cache_namespace)
    with serving(environment, log=tmp_path / "log") as second:
        assert cached(chat(second, BOB, text)) < 50, "only what all prompts begin with"
        assert cached(chat(second, ANN, text)) > 400


def rows(file: Path) -> list[Any]:
    """Return the entries of a file of prompt tokens; none of another file."""
    if not file.is_file() or not file.read_bytes().startswith(b"edgelm chats"):
        return []
    entries: list[Any] = json.loads(file.read_text().partition("\n")[2])
    return entries


def chunks_of(seen: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [chunk for name, event in list(seen) if name == "step" for chunk in event["chunks"]]


def num_ended(seen: list[tuple[str, dict[str, Any]]]) -> int:
    return sum("finish_reason" in chunk for chunk in chunks_of(seen))


def test_to_watch_shows_each_key_its_own_texts_and_counts_of_others(front: Front) -> None:
    chat(front, ANN, "hello")  # now the model is loaded
    with watching(front, of(ANN)) as ann, watching(front, of(BOB)) as bob:
        for seen in (ann, bob):
            until("the watcher is told of the engine", lambda seen=seen: any(name == "kv" for name, _ in seen))
        texts = {
            key: chat(front, key, f"hello from {key.name}", logprobs=True, top_logprobs=2)["choices"][0]
            for key in (ANN, BOB)
        }
        for key, seen in ((ANN, ann), (BOB, bob)):
            until("both answers end", lambda seen=seen: num_ended(seen) == 2)
            assert seen[0][0] == "engine"
            assert seen[0][1]["model"] == "starter"
            own = [chunk for chunk in chunks_of(seen) if "tokens" in chunk]
            others = [chunk for chunk in chunks_of(seen) if "tokens" not in chunk]
            assert own
            assert others
            assert not any("request_id" in chunk for chunk in others)
            told = [token for chunk in own for token in chunk["tokens"]]
            expected = texts[key]["logprobs"]["content"]
            assert [token["text"] for token in told[: len(expected)]] == [entry["token"] for entry in expected]
            assert [token["logprob"] for token in told[: len(expected)]] == [entry["logprob"] for entry in expected]
            assert {len(token["top"]) for token in told} == {2}
            regions = [event for name, event in seen if name == "kv"]
            assert regions[-1]["others"], "the other key's prefixes are counted"
            assert sum(chunk["new"] for chunk in chunks_of(seen)) == 16


def test_to_watch_needs_a_key_and_a_known_model(front: Front) -> None:
    assert front.http.get("/edgelm/events").status_code == 401
    assert front.http.get("/edgelm/events?model=nothing", headers=of(ANN)).status_code == 404
