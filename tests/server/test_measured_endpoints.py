"""`edgelm bench` and `edgelm eval` of a model behind an endpoint, named by --endpoint or in config.toml."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import EngineError
from edgelm.commands.endpoints import Endpoint
from edgelm.evaluation.scores import MAX_LOG
from edgelm.server.api.errors import ApiError
from edgelm.server.remotes.boxes import BoxError
from tests.server.fake_remote import Asked, config_of, remote_server
from tests.server.harness import Front
from tests.server.test_serve import edgelm

TEXT = "the old miller went to the river and counted his sheep again until it was dark. " * 40


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def test_eval_scores_the_same_tokens_as_an_engine_here(
    front: Front, environment: dict[str, str], models: Path, text: Path
) -> None:
    options = (text, "--window", "64", "--limit", "3", "--json")
    there = edgelm(environment, "eval", "tiny", *options, "--endpoint", front.address)
    here = edgelm(environment, "eval", models / "tiny.gguf", *options)
    assert (there.returncode, here.returncode) == (0, 0), there.stderr + here.stderr
    remote, local = json.loads(there.stdout), json.loads(here.stdout)
    assert [remote[name] for name in ("tokens", "windows", "window")] == [
        local[name] for name in ("tokens", "windows", "window")
    ]
    assert remote["perplexity"] == pytest.approx(local["perplexity"], rel=0.01)
    assert remote["stderr"] == pytest.approx(local["stderr"], rel=0.05)
    shown = edgelm(environment, "eval", "tiny", *options[:-1], "--endpoint", front.address).stdout
    assert shown.splitlines()[0] == f"tiny at {front.address}/v1"
    assert "tokens scored" in shown


def test_bench_measures_what_a_client_sees(front: Front, environment: dict[str, str]) -> None:
    done = edgelm(
        environment, "bench", "tiny", "--endpoint", front.address, "-p", "200", "-n", "20", "-r", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    prompt, decode = result["results"]
    assert (prompt["test"], decode["test"], decode["tokens"]) == ("pp200", "tg20", 20)
    assert 100 < prompt["tokens"] < 400
    assert all(row["tokens_per_second"] > 0 and row["first_token_ms"] > 0 for row in result["results"])
    assert (result["endpoint"], result["through"]) == (f"{front.address}/v1", "endpoint")


def answering(asked: Asked) -> None:
    """Know neither `ignore_eos` nor probabilities of a prompt, and end early."""
    if "ignore_eos" in asked.body:
        asked.say(400, {"error": {"message": "unrecognized request argument: ignore_eos"}})
    elif asked.path.endswith("/tokenize"):
        asked.say(200, {"tokens": [ord(char) for char in asked.body["prompt"]]})
    elif asked.path.endswith("/chat/completions"):
        asked.start()
        asked.chunk(content="a")
        asked.chunk(content="b")
        asked.end()
    else:
        asked.say(200, {"choices": [{"text": "a", "logprobs": None}]})


def unlikely(asked: Asked) -> None:
    """Tell that every token of a prompt cannot come, as vLLM does: by -9999."""
    if asked.path.endswith("/tokenize"):
        asked.say(200, {"tokens": [ord(char) for char in asked.body["prompt"]]})
    else:
        values = [-9999.0] * len(asked.body["prompt"])
        asked.say(200, {"choices": [{"text": "a", "logprobs": {"token_logprobs": values}}]})


def hostile(asked: Asked) -> None:
    """Tell finite numbers whose squares are infinite."""
    if asked.path.endswith("/tokenize"):
        asked.say(200, {"tokens": [ord(char) for char in asked.body["prompt"]]})
    else:
        values = [-1e300] * len(asked.body["prompt"])
        asked.say(200, {"choices": [{"text": "a", "logprobs": {"token_logprobs": values}}]})


def silent_about_usage(asked: Asked) -> None:
    asked.start()
    asked.chunk(content="a", reason="stop")
    asked.event(b"[DONE]")


@pytest.fixture(scope="module")
def elsewhere(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An environment with models of another server."""
    behaviours = {"box": answering, "odd": silent_about_usage, "unlikely": unlikely, "hostile": hostile}
    with remote_server(behaviours) as (address, seen):
        config = tmp_path_factory.mktemp("config")
        tables = {name: {"endpoint": f"{address}/{name}/v1", "model": "their-name"} for name in behaviours}
        (config / "config.toml").write_text(config_of(tables))
        yield environment | {"EDGELM_CONFIG_DIR": str(config)}, seen


def test_bench_knows_the_models_of_other_servers(elsewhere: tuple[dict[str, str], list[Asked]]) -> None:
    environment, seen = elsewhere
    done = edgelm(environment, "bench", "box", "-n", "16", "-p", "0", "-r", "1")
    assert done.returncode == 0, done.stderr
    assert "their-name at http://127.0.0.1:" in done.stdout
    assert "tg16" in done.stdout
    assert seen[-1].body["model"] == "their-name"
    assert "ignore_eos" not in seen[-1].body


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("bench", "odd"), "tells no token counts"),
        (("bench", "box", "--in-process"), "--in-process needs the engine"),
        (("bench", "box", "--kv", "int8"), "--kv is for engines of this machine"),
        (("bench", "nowhere", "--api-key", "a secret key"), "add --endpoint URL"),
        (("bench", "box", "--endpoint", "http://10.1.2.3/v1", "--api-key", "a secret key"), "unencrypted"),
        (("eval", "box", "TEXT", "--window", "16"), "does not tell the probabilities of a prompt"),
        (("eval", "box", "TEXT", "--window", "16", "--stride", "16"), "--stride is 16; give 1 to 15"),
        (("eval", "box", "TEXT", "--stride", "0"), "--stride is 0; give 1 to 511"),
        (("eval", "hostile", "TEXT", "--window", "16"), "probabilities of a prompt that are out of range"),
        (("eval", "box", "TEXT", "--against", "f16"), "--against needs the engine"),
        (("eval", "box", "TEXT", "--plot"), "only of models here"),
        (("eval", "odd", "TEXT"), "sends events"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    elsewhere: tuple[dict[str, str], list[Asked]], text: Path, words: tuple[str, ...], reason: str
) -> None:
    done = edgelm(elsewhere[0], *(str(text) if word == "TEXT" else word for word in words))
    assert done.returncode in (1, 2)
    assert reason in done.stderr or (reason == "sends events" and "answers with text/event-stream" in done.stderr)
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_perplexity_beyond_all_numbers_is_the_largest(
    elsewhere: tuple[dict[str, str], list[Asked]], text: Path
) -> None:
    done = edgelm(elsewhere[0], "eval", "unlikely", text, "--window", "16", "--limit", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["perplexity"], result["stderr"]) == (math.exp(MAX_LOG), 0)


async def test_an_answer_that_breaks_is_not_sent_again() -> None:
    """Another request drops a field while this one gets its answer."""
    num_sent = 0

    class Breaking:
        omitted: frozenset[str] = frozenset()

        async def chunks(self, *_: object) -> AsyncGenerator[dict[str, Any], None]:
            nonlocal num_sent
            num_sent += 1
            yield {}
            self.omitted |= {f"field {num_sent}"} if num_sent < 3 else frozenset()
            raise BoxError("failed", ApiError(502, "remote_failed", "it broke"))

    box: Any = Breaking()
    with pytest.raises(EngineError, match="it broke"):
        _ = [chunk async for chunk in Endpoint("big", box).chunks("/completions", {})]
    assert num_sent == 1
