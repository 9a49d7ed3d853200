"""The front's routes over engines that a test holds back, lets answer or takes away; and a real one without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from edgelm.base.config import load_config
from edgelm.base.errors import ModelError
from edgelm.base.model_tables import ModelTable
from edgelm.base.workers.messages import Footprint, Ready
from edgelm.library import local
from edgelm.library.scan import LocalModel
from edgelm.server import proxy
from edgelm.server.access import Rules
from edgelm.server.engines.process import Launcher
from edgelm.server.engines.table import EngineTable
from edgelm.server.front import Front, front_app
from edgelm.server.keys import Key, Keys
from edgelm.server.models import ModelNames
from edgelm.server.routes.admin import START_LIMIT_S, wait_limit_s
from edgelm.server.stored import ResponseStore
from tests.server.fake_engines import FakeHost, FakeProcess, Launches
from tests.server.test_models import write_t5_folder

LIMIT_S = 30
NOW = {"prefer": "wait=0"}
CHUNKS = (b'data: {"a": 1}\n\ndata: {"b"', b': 2}\n\ndata: {"half": ')


class Upstream(httpx2.AsyncBaseTransport):
    """The answers of an engine."""

    def __init__(self) -> None:
        self.broken = False
        self.ends: list[Callable[[], None]] = []  # called one by one, soon after a connection broke
        self.bodies: list[bytes] = []
        self.closed = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/stats":
            return httpx2.Response(200, json={"requests": 7, "rss_bytes": 8})
        self.bodies.append(await request.aread())
        if json.loads(self.bodies[-1]).get("stream"):
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return httpx2.Response(200, headers=headers, stream=Pieces(self))
        if self.broken:
            self.end_soon()
            raise httpx2.ReadError("broken")
        return httpx2.Response(400, json={"error": {"code": "x"}}, headers={"retry-after": "5", "x-secret": "1"})

    def end_soon(self) -> None:
        if self.ends:
            asyncio.get_running_loop().call_later(0.05, self.ends.pop(0))


class Pieces(httpx2.AsyncByteStream):
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in CHUNKS:
            yield chunk
        if self._upstream.broken:
            self._upstream.end_soon()
            raise httpx2.RemoteProtocolError("broken")
        yield b"3}\n\n"

    async def aclose(self) -> None:
        self._upstream.closed += 1


class Fakes(Launches):
    def __init__(self) -> None:
        super().__init__()
        self.upstream = Upstream()

    async def __call__(self, model: LocalModel, footprint: Footprint | None) -> FakeProcess:
        process = await super().__call__(model, footprint)
        process.client = httpx2.AsyncClient(transport=self.upstream, base_url="http://engine")
        return process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(b"")
    return tmp_path / "m.gguf"


@asynccontextmanager
async def fronted(
    launches: Any,
    model: Path,
    rules: Rules = Rules(loopback=True),  # noqa: B008 - it is frozen
    *,
    folders: Sequence[Path] = (),
    tables: Sequence[ModelTable] = (),
) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve a model, or those of folders in its place."""
    async with asyncio.timeout(LIMIT_S), EngineTable(launches, FakeHost(), idle_timeout_s=0) as table:
        names = ModelNames(None, [] if folders else [model], folders=folders, tables=tables)
        store = ResponseStore(model.parent / "responses.sqlite")
        app = front_app(Front("http://127.0.0.1:1", table, names, store), rules)
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield http


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields


async def chat(http: httpx2.AsyncClient, prefer: str = "wait", **fields: Any) -> httpx2.Response:
    return await http.post("/v1/chat/completions", json=body(**fields), headers={"prefer": prefer})


async def test_503_with_progress_while_an_engine_starts(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        answer = await chat(http, "wait=0")
        assert answer.status_code == 503
        assert answer.json()["error"]["progress"] is None
        (await launches.number(1)).progress = 0.4
        answer = await chat(http, "respond-async, wait=0")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["progress"]) == (503, "model_loading", 0.4)
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        state = (await http.get("/edgelm/ps")).json()["models"][0]
        assert (state["state"], state["progress"], state["pid"], state["context"]) == ("starting", 0.4, 1, None)
        waiting = asyncio.create_task(chat(http))
        launches.processes[0].load()
        assert (await waiting).status_code == 400, "what the engine says"
        state = (await http.get("/edgelm/ps")).json()["models"][0]
        assert (state["state"], state["progress"], state["requests"], state["rss_bytes"]) == ("ready", 1, 7, 8)
        assert (state["model"], state["path"], state["context"]) == ("m", str(model), 512)


async def test_an_answer_comes_as_the_engine_gave_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        waiting = asyncio.create_task(chat(http, user="ünïcode"))
        (await launches.number(1)).load()
        answer = await waiting
        assert answer.json() == {"error": {"code": "x"}}
        assert answer.headers["retry-after"] == "5"
        assert "x-secret" not in answer.headers
        assert json.loads(launches.upstream.bodies[0]) == body(user="ünïcode")
        launches.upstream.broken = True
        monkeypatch.setattr(proxy, "ENDING_S", 0)
        launches.upstream.ends.append(partial(launches.processes[0].die, "died of a test"))
        answer = await chat(http)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "died of a test")
        assert answer.json()["error"]["code"] == "engine_died"


async def test_what_an_ending_engine_did_not_take_goes_to_one_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "ENDING_S", LIMIT_S)
    launches = Fakes()
    async with fronted(launches, model) as http:
        waiting = asyncio.create_task(chat(http))
        (await launches.number(1)).load()
        await waiting
        launches.upstream.broken = True
        launches.upstream.ends.append(partial(launches.processes[0].die, "first"))
        waiting = asyncio.create_task(chat(http))
        second = await launches.number(2)
        launches.upstream.broken = False
        second.load()
        assert (await waiting).status_code == 400, "what the second engine says"
        launches.upstream.broken = True
        launches.upstream.ends.append(partial(second.die, "second"))
        waiting = asyncio.create_task(chat(http))
        third = await launches.number(3)
        third.load()
        launches.upstream.ends.append(partial(third.die, "third"))
        assert (await waiting).json()["error"]["message"] == "third"
        assert len(launches.upstream.bodies) == 5, "sent to two engines at most"


async def test_events_are_passed_on_whole(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        waiting = asyncio.create_task(chat(http, stream=True))
        (await launches.number(1)).load()
        answer = await waiting
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.content == b"".join(CHUNKS) + b"3}\n\n"
        launches.upstream.broken = True
        launches.upstream.ends.append(partial(launches.processes[0].die, "died of a test"))
        whole, error = (await chat(http, stream=True)).content[:-2].rsplit(b"\n\n", 1)
        assert whole == b'data: {"a": 1}\n\ndata: {"b": 2}', "no half event comes before the error"
        assert json.loads(error[6:])["error"]["message"].startswith("died of a test")
        assert launches.upstream.closed == 2


async def test_a_client_of_anthropic_reads_models_in_its_form(model: Path) -> None:
    async with fronted(Fakes(), model) as http:
        headers = {"anthropic-version": "2023-06-01"}
        listed = (await http.get("/v1/models", headers=headers)).json()
        one = (await http.get("/v1/models/m", headers=headers)).json()
        assert (one["type"], one["id"], one["display_name"]) == ("model", "m", "m")
        assert one in listed["data"]


async def test_the_list_and_chat_agree_on_names(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        waiting = asyncio.create_task(chat(http))
        (await launches.number(1)).load()
        await waiting
        for name in ("m", "M", "m.gguf"):
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == "m"
            assert (await chat(http, model=name)).status_code == 400, "what the engine says"
        missing = (await http.get("/v1/models/other")).json()["error"]
        assert (missing["code"], missing["param"]) == ("model_not_found", "model")
        assert missing == (await chat(http, model="other")).json()["error"]


async def test_a_bad_request_starts_no_engine(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        assert (await chat(http, tools=[{}])).status_code == 400
        assert (await chat(http, model="other")).status_code == 404
        model.unlink()  # noqa: ASYNC240 - a test may block
        gone = (await chat(http)).json()["error"]
        assert (gone["code"], gone["message"]) == ("model_not_found", "the file of m is gone")
        assert launches.processes == []


async def test_a_model_that_cannot_be_loaded(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        waiting = asyncio.create_task(chat(http))
        (await launches.number(1)).fail(ModelError("it needs 9 GiB", "take a smaller one"))
        answer = await waiting
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "it needs 9 GiB; take a smaller one"
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ([], START_LIMIT_S),
        (["wait"], START_LIMIT_S),
        (["Wait=7"], 7),
        (["wait=0"], 0),
        (["wait = 5"], 5),
        (['wait="5"'], 5),
        (["respond-async, wait=10"], 10),
        (["respond-async", "wait=10; x=1"], 10),
        (["wait=999999999"], START_LIMIT_S),
        (["await=3"], START_LIMIT_S),
        (["wait=-3"], START_LIMIT_S),
        (["handling=lenient"], START_LIMIT_S),
    ],
)
def test_prefer(prefer: list[str], seconds: float) -> None:
    headers = [(b"prefer", value.encode()) for value in prefer]
    assert wait_limit_s(Request({"type": "http", "headers": headers})) == seconds


async def test_engines_where_there_are_no_unix_sockets(models: Path, cache: Path, tmp_path: Path) -> None:
    """A loopback port instead, and nobody but the front may use it."""
    config = load_config({"ctx": 512}, {"EDGELM_CACHE_DIR": str(cache), "EDGELM_CONFIG_DIR": str(tmp_path)})
    async with asyncio.timeout(2 * LIMIT_S):
        process = await Launcher(config, None)(LocalModel("tiny", models / "tiny.gguf"), None)
        try:
            await process.ready()
            assert process.info is not None
            assert process.info.footprint is not None
            assert process.info.footprint.context == 512
            assert replace(process.info, port=None, footprint=None) == Ready("tiny llama f32", "llama", "cpu", 512)
            assert process.client.base_url.host == "127.0.0.1"
            answer = await process.client.post("/v1/chat/completions", json=body(max_tokens=2))
            assert answer.json()["usage"]["completion_tokens"] <= 2
            async with httpx2.AsyncClient(base_url=process.client.base_url, trust_env=False) as stranger:
                assert (await stranger.get("/stats")).status_code == 401
        finally:
            await process.close()


async def test_a_model_is_loaded_and_unloaded(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        name = {"model": "m"}
        answer = await http.post("/models/unload", json=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_loaded")
        answer = await http.post("/models/load", json=name, headers={"prefer": "wait=0"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        loading = asyncio.create_task(http.post("/models/load", json=name))
        process = await launches.number(1)
        while not (await http.get("/edgelm/ps")).json()["models"][0]["requests"]:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        answer = await http.post("/models/unload", json=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_in_use")
        process.load()
        assert (await loading).json() == {"success": True}
        assert (await http.post("/models/load", json=name)).json() == {"success": True}, "it is loaded already"
        assert not process.closed
        assert (await http.post("/models/unload", json=name)).json() == {"success": True}
        assert process.closed
        assert (await http.get("/edgelm/ps")).json()["models"] == []
        assert (await http.post("/models/load", json={"model": "no such"})).status_code == 404
        assert (await http.post("/models/unload", json={"model": "no such"})).status_code == 404
        assert (await http.post("/models/load", json={"model": 1})).json()["error"]["param"] == "model"
        assert len(launches.processes) == 1


async def loaded(http: httpx2.AsyncClient, launches: Fakes, number: int = 1) -> FakeProcess:
    """Load the model m, and return its process."""
    loading = asyncio.create_task(http.post("/models/load", json={"model": "m"}))
    process = await launches.number(number)
    process.load()
    assert (await loading).json() == {"success": True}
    return process


@pytest.mark.parametrize("name", ["m", "M", "m:latest", "PATH", "mine", "Mine:latest"])
async def test_a_model_whose_file_is_gone_is_unloaded(model: Path, name: str) -> None:
    launches = Fakes()
    name = str(model) if name == "PATH" else name
    async with fronted(launches, model, tables=(ModelTable("m", "", aliases=("mine",)),)) as http:
        process = await loaded(http, launches)
        model.unlink()  # noqa: ASYNC240 - a test may block
        assert (await http.post("/models/load", json={"model": name})).status_code == 404
        assert (await http.post("/models/unload", json={"model": name})).json() == {"success": True}
        assert process.closed


async def test_a_model_whose_name_leads_to_another_file_is_unloaded(tmp_path: Path) -> None:
    launches, old, new = Fakes(), tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for path in (old, new):
        path.parent.mkdir()
    old.write_bytes(b"")
    async with fronted(launches, old, folders=[old.parent, new.parent]) as http:
        first = await loaded(http, launches)
        old.rename(new)
        refused = await http.post("/models/unload", json={"model": str(new)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_loaded")
        second = await loaded(http, launches, 2)
        for process in (second, first):  # the one that has the name now comes first
            assert not process.closed
            assert (await http.post("/models/unload", json={"model": "m"})).json() == {"success": True}
            assert process.closed
        assert (await http.get("/edgelm/ps")).json()["models"] == []


async def test_a_name_with_a_tag_unloads_no_namesake_without(tmp_path: Path) -> None:
    launches = Fakes()
    for name in ("m", "m:latest"):
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    async with fronted(launches, tmp_path / "m.gguf", folders=[tmp_path]) as http:
        process = await loaded(http, launches)
        answer = await http.post("/models/unload", json={"model": "m:latest"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_loaded")
        assert not process.closed


@pytest.mark.parametrize("action", ["load", "unload"])
async def test_only_who_may_change_the_server_loads_and_unloads(model: Path, action: str) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        sent = {"json": {"model": "m"}, "headers": {"x-forwarded-for": "10.0.0.7"}}
        answer = await http.post(f"/models/{action}", **sent)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_admin")
        assert not launches.processes


async def test_a_model_that_no_engine_can_run_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "find_spec", lambda _: object())  # as where torch is installed
    launches = Fakes()
    async with fronted(launches, write_t5_folder(tmp_path / "t5")) as http:
        for path, fields in NAMING.items():
            if path != "/api/show":
                answer = await http.post(path.strip(), json={"model": "t5", **fields})
                assert (answer.status_code, "'t5'" in answer.text) == (400, True), (path, answer.text)
        answer = await http.post("/models/load", json={"model": "t5"})
        assert (answer.status_code, "'t5'" in answer.text) == (400, True)
        assert "t5" not in [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        assert "t5:latest" not in [model["name"] for model in (await http.get("/api/tags")).json()["models"]]
    assert not launches.processes


USERS = Keys([Key("user", "a key of a user"), Key("boss", "a key of an admin", admin=True)])
NAMING = {  # the routes that take the name of a model
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/completion": {"prompt": "hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"prompt": "hi"},
    "/api/generate ": {},  # only loads
    "/api/embed": {"input": "hi"},
    "/api/show": {},
}
LOOKING = ("/v1/models/{}", "/props?model={}", "/slots?model={}", "/tokenizer_info?model={}", "/edgelm/events?model={}")


@pytest.mark.parametrize(
    ("rules", "headers"),
    [
        (Rules(loopback=True, keys=USERS), {"authorization": "Bearer a key of a user"}),
        (Rules(loopback=True), {"x-forwarded-proto": "https"}),
        (Rules(loopback=True, keys=Keys([Key("api-key", "of --api-key", admin=None)])), {"x-api-key": "of --api-key"}),
    ],
    ids=["a key without admin", "behind a proxy", "a key without a mark"],
)
async def test_only_an_administrator_names_a_file_of_the_machine(
    model: Path, rules: Rules, headers: dict[str, str]
) -> None:
    launches, other = Fakes(), model.with_name("other.gguf")
    other.touch()
    async with fronted(launches, model, rules) as http:
        for path, fields in NAMING.items():
            answer = await http.post(path.strip(), json={"model": str(other), **fields}, headers=headers)
            assert (answer.status_code, "there is no model" in answer.text) == (404, True), (path, answer.text)
        for path in LOOKING:
            answer = await http.get(path.format(other), headers=headers)
            assert (answer.status_code, "there is no model" in answer.text) == (404, True), (path, answer.text)
    assert not launches.processes


@pytest.mark.parametrize(
    ("rules", "headers"),
    [(Rules(loopback=True, keys=USERS), {"x-api-key": "a key of an admin"}), (Rules(loopback=True), {})],
    ids=["a key with admin", "this machine"],
)
async def test_an_administrator_names_a_file_and_gets_one_engine(
    model: Path, rules: Rules, headers: dict[str, str]
) -> None:
    launches, other = Fakes(), model.with_name("other.gguf")
    other.touch()
    async with fronted(launches, model, rules) as http:
        for path in (str(other), f"{other.parent}/../{other.parent.name}/{other.name}"):
            answer = await http.post("/v1/chat/completions", json=body(model=path), headers=headers | NOW)
            assert answer.status_code == 503, answer.text
        await launches.number(1)
        assert launches.models == ["other"]
