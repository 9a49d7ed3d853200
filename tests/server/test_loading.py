"""Loading and unloading on a real front: by request, by API, by command, by `keep_alive`; and settings of one model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgelm.base.errors import EdgeLMError
from edgelm.commands.cli import app
from edgelm.commands.plan_loaded import loaded_beside
from tests.server.harness import ENDLESS, Front, serving, until
from tests.server.test_serve import edgelm
from tests.tiny import write_tiny

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
POLLED = (
    "/health",
    "/v1/models",
    "/v1/models/small",
    "/models",
    "/edgelm/ps",
    "/metrics",
    "/props",
    "/slots",
    "/tokenizer_info",
)
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
}


@pytest.fixture(scope="module")
def front(environment: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front with `small` (tiny.gguf with settings of its own, and the name `alias`) and long.gguf."""
    folder = tmp_path_factory.mktemp("small")
    write_tiny(folder / "small.gguf", context=512)
    (folder / "mine.jinja").write_text(TEMPLATE)
    config = Path(environment["EDGELM_CONFIG_DIR"])
    config.mkdir(parents=True, exist_ok=True)
    table = f"[models.small]\nctx = 300\nalias = 'alias'\nkeep_alive = '100s'\ntemplate = '{folder / 'mine.jinja'}'\n"
    (config / "config.toml").write_text(table)
    log = folder / "front.log"
    with serving(environment, folder / "small.gguf", models / "long.gguf", log=log) as running:
        yield running
    assert "Traceback" not in log.read_text()


def printed(environment: dict[str, str], *arguments: str) -> str:
    """Return the output of a command that runs in this process. Raises its error."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return CliRunner().invoke(app, arguments, catch_exceptions=False).stdout


def unload_all(front: Front) -> None:
    def unload() -> bool:
        models = front.ps()["models"]
        for model in models:  # refused as long as the front has not noticed that its client left
            front.http.post("/models/unload", json={"model": model["model"]})
        return not models

    until("nothing is loaded", unload)


def test_polling_wakes_no_model_and_prolongs_no_life(front: Front) -> None:
    unload_all(front)
    for path in POLLED:
        front.http.get(path)
    assert front.ps()["models"] == []
    front.chat("small", max_tokens=1)
    idle = front.ps("small")["idle_s"]
    for path in POLLED:
        front.http.get(path)
    assert front.ps("small")["idle_s"] > idle


def share_of_promise(front: Front) -> float:
    """Return the memory of the model by its prediction."""
    entry = front.ps("small")
    return float(entry["memory_bytes"] / entry["predicted_bytes"])


def test_load_ps_plan_and_unload_by_commands(front: Front, environment: dict[str, str]) -> None:
    unload_all(front)
    done = edgelm(environment, "load", "alias", "--keep-alive", "30m")
    assert (done.returncode, done.stderr) == (0, "")
    assert "alias is loaded" in done.stdout
    entry = front.ps("small")
    assert (entry["keep_alive_s"], entry["context"]) == (1800, 300)
    parts = ("weights_bytes", "kv_bytes", "workspace_bytes", "draft_bytes")
    assert entry["predicted_bytes"] == sum(entry["predicted"][part] for part in parts)
    if sys.platform == "linux":
        until("the engine's own processes run, too", lambda: share_of_promise(front) > 0.5)
        assert share_of_promise(front) < 1.2, "the prediction is true"
    status = {model["id"]: model["status"]["value"] for model in front.http.get("/models").json()["data"]}
    assert (status["small"], status["alias"], status["long"]) == ("loaded", "loaded", "unloaded")
    plan = json.loads(printed(environment, "plan", "starter", "--json"))
    assert [model["model"] for model in plan["beside"]["models"]] == ["small"]
    assert plan["beside"]["models"][0]["gpu_bytes"] == 0
    assert "small: " in "\n".join(loaded_beside(Path(environment["EDGELM_RUNTIME_DIR"])).lines(1, 0))
    shown = printed(environment, "ps")
    assert all(word in shown for word in ("PREDICTED", "small", "30 min", "are free"))
    assert printed(environment, "unload", "small") == "small is unloaded\n"
    with pytest.raises(EdgeLMError, match="small is not loaded"):
        printed(environment, "unload", "small")
    assert printed(environment, "unload", "--all") == "no model is loaded\n"


def test_commands_without_a_server(own: dict[str, str]) -> None:
    done = edgelm(own, "load", "tiny")
    assert done.stderr == "error: no edgelm server is running; start one with `edgelm serve`\n"
    with pytest.raises(EdgeLMError, match="no edgelm server is running"):
        printed(own, "unload", "--all")


def test_keep_alive_in_every_dialect(front: Front) -> None:
    for minutes, (path, fields) in enumerate(BODIES.items(), 2):
        answer = front.http.post(path, json={"model": "small", "keep_alive": f"{minutes}m"} | fields)
        assert answer.status_code == 200, answer.text
        assert front.ps("small")["keep_alive_s"] == 60 * minutes, path
    path, fields = next(iter(BODIES.items()))
    front.http.post(path, json={"model": "small", "keep_alive": 0} | fields)
    until("it is unloaded", lambda: front.ps("small") is None)
    for path, fields in BODIES.items():
        refused = front.http.post(path, json={"model": "small", "keep_alive": "soon"} | fields)
        assert refused.status_code == 400
        assert "keep_alive" in refused.json()["error"]["message"]
    assert front.ps("small") is None, "a request that is wrong loads nothing"


def test_a_model_in_use_is_not_unloaded(front: Front) -> None:
    events = front.events("long", max_tokens=30_000, **ENDLESS)
    next(events)
    refused = front.http.post("/models/unload", json={"model": "long"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
    events.close()  # type: ignore[attr-defined]


def test_settings_of_one_model_reach_its_engine(front: Front) -> None:
    unload_all(front)
    answer = front.chat("alias", max_tokens=1).json()
    assert answer["model"] == "alias"
    assert answer["edgelm"]["context"]["size"] == 300
    assert front.ps("small")["keep_alive_s"] == 100
    text = TEMPLATE.replace("{% for message in messages %}", "").replace("{% endfor %}", "")
    plain = text.replace("{{ message.content }}", "hello")
    counted = front.http.post("/v1/completions", json={"model": "small", "prompt": plain, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == counted["usage"]["prompt_tokens"], "the template of its table"
