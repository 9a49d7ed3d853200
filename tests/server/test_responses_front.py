"""/v1/responses of a real front, as OpenAI's client meets it: streams, stored conversations, tools."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.server.harness import ENDLESS, LIMIT_S, Front, serving

MODEL = "starter"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Return the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.address}/v1", api_key="any", timeout=LIMIT_S, max_retries=0) as made:
        yield made


def create(client: openai.OpenAI, **fields: Any) -> Response:
    response = client.responses.create(**{"model": MODEL, "input": "Say hello", "max_output_tokens": 16} | fields)
    assert isinstance(response, Response)
    return response


def test_an_answer_is_valid_and_can_be_read_again(client: openai.OpenAI) -> None:
    response = create(client, metadata={"a": "b"}, instructions="be brief", temperature=0)
    Response.model_validate(response.model_dump(exclude_unset=True))
    assert response.id.startswith("resp_")
    assert response.output_text
    assert response.usage
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id) == response
    (item,) = client.responses.input_items.list(response.id)
    assert item.type == "message"
    assert item.content[0].text == "Say hello"  # type: ignore[union-attr]
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="no stored response"):
            call(response.id)


def test_the_stream_helper_gets_the_same_answer(client: openai.OpenAI) -> None:
    whole = create(client, temperature=0, store=False)
    with client.responses.stream(model=MODEL, input="Say hello", max_output_tokens=16, temperature=0) as stream:
        events = list(stream)
        final = stream._state._completed_response or events[-1].response  # type: ignore[union-attr]
    assert final.output_text == whole.output_text
    assert final.status == whole.status
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert client.responses.retrieve(final.id).output_text == whole.output_text
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(final.id, stream=True)


def test_each_read_has_whole_events(front: Front) -> None:
    body = {"model": MODEL, "input": "Say hello", "max_output_tokens": 16, "stream": True}
    with front.http.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = list(answer.iter_raw())
    assert all(piece.endswith(b"\n\n") for piece in pieces)
    numbers = [
        json.loads(line[6:])["sequence_number"] for line in b"".join(pieces).splitlines() if line[:5] == b"data:"
    ]
    assert numbers == list(range(len(numbers)))


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = create(client, max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert client.responses.retrieve(response.id).status == "incomplete"


def test_a_conversation_continues_and_its_prompt_is_cached(client: openai.OpenAI) -> None:
    first = create(client, input="My name is Ann. Remember it well, please.")
    second = create(client, input=[{"role": "user", "content": "What is my name?"}], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 2
    whole = create(
        client,
        store=False,
        input=[
            {"role": "user", "content": "My name is Ann. Remember it well, please."},
            *[item.to_dict() for item in first.output],  # type: ignore[list-item]
            {"role": "user", "content": "What is my name?"},
        ],
    )
    assert whole.usage
    assert whole.usage.input_tokens == second.usage.input_tokens
    tokens = client.responses.input_tokens.count(model=MODEL, input="What is my name?", previous_response_id=first.id)
    assert tokens.input_tokens == second.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        create(client, previous_response_id=second.id)


def test_items_are_referred_to_by_their_id(client: openai.OpenAI) -> None:
    first = create(client)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    again = create(
        client, input=[{"role": "user", "content": "Say hello"}, reference, {"role": "user", "content": "x"}]
    )
    chained = create(client, input="x", previous_response_id=first.id)
    assert again.usage
    assert chained.usage
    assert again.usage.input_tokens == chained.usage.input_tokens
    for name in ("msg_none", ""):
        with pytest.raises(openai.NotFoundError, match="no stored item"):
            create(client, input=[{"type": "item_reference", "id": name}])
    with pytest.raises(openai.BadRequestError, match="at most 64"):
        create(client, input=[reference] * 65)
    with pytest.raises(openai.BadRequestError) as caught:  # the body is checked before anything is read
        create(client, input=[{"type": "item_reference", "id": "msg_none"}, {"role": "critic", "content": "a"}])
    assert caught.value.param == "input.1.role"


def test_a_response_that_is_too_large_is_not_stored(client: openai.OpenAI, front: Front) -> None:
    response = create(client, input=large_input(4 * 2**20))
    assert response.output_text
    check_not_stored(response, "at most 4,194,304 are allowed")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert "a response is not stored" in front.log.read_text()


def large_input(nbytes: int) -> Any:
    """Return input with an item of so many bytes that is no part of the prompt."""
    item = {"type": "web_search_call", "id": "x", "status": "completed", "action": "x" * nbytes}
    return [{"role": "user", "content": "Say hello"}, item]


def check_not_stored(response: Response, reason: str) -> None:
    """An answer that could not be stored says so, and why."""
    assert response.model_extra
    (note,) = response.model_extra["edgelm"]["notes"]
    assert note.startswith("this response is not stored")
    assert reason in note
    assert response.store is False


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(25)]
    response = create(client, input=items)
    newest = [item.content[0].text for item in client.responses.input_items.list(response.id)]  # type: ignore[union-attr]
    assert newest == [str(number) for number in reversed(range(25))]
    page = client.responses.input_items.list(response.id, order="asc", limit=3)
    assert [item.content[0].text for item in page.data] == ["0", "1", "2"]  # type: ignore[union-attr]
    assert page.has_more
    for limit in (0, 101, "9" * 5000, "٣", "-1", ""):
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.responses.input_items.list(response.id, limit=limit)  # type: ignore[arg-type]


def test_nothing_is_stored_if_the_client_wants_it_so(client: openai.OpenAI) -> None:
    response = create(client, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"
    count = client.responses.input_tokens.count(model=MODEL, input="Say hello")
    assert response.usage
    assert count.input_tokens == response.usage.input_tokens


def test_fields_of_other_apis_have_their_effect(client: openai.OpenAI) -> None:
    extra: dict[str, Any] = {"structured_outputs": {"choice": ["blue", "green"]}, "seed": 1}
    assert create(client, extra_body=extra).output_text in ("blue", "green")
    stopped = create(client, extra_body={"stop": "l", "guided_regex": "hello"})
    assert (stopped.output_text, stopped.status) == ("he", "completed")


class City(pydantic.BaseModel):
    """The form of an answer."""

    name: str = pydantic.Field(max_length=8)
    large: bool


def test_an_answer_has_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Name a city", "text_format": City, "max_output_tokens": 200}
    parsed = client.responses.parse(**fields).output_parsed
    assert isinstance(parsed, City)
    with client.responses.stream(**fields) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_log_probabilities(client: openai.OpenAI) -> None:
    response = create(client, top_logprobs=2, include=["message.output_text.logprobs"], temperature=0)
    part = response.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_custom_tools_and_namespaces(client: openai.OpenAI) -> None:
    patch: Any = {"type": "custom", "name": "patch", "description": "Write a patch"}
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 2000}
    (item,) = [item for item in create(client, tools=[patch], **fields).output if item.type != "message"]
    assert item.type == "custom_tool_call"
    mail: Any = {"type": "namespace", "name": "mail", "description": "Mail", "tools": [WEATHER]}
    (item,) = [item for item in create(client, tools=[mail], **fields).output if item.type != "message"]
    assert item.type == "function_call"
    assert (item.name, item.namespace) == ("weather", "mail")
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "sent"}
    history: list[Any] = [{"role": "user", "content": "hi"}, item.to_dict(), result]
    assert create(client, tools=[mail], input=history, tool_choice="none").output_text is not None


def test_many_conversations_at_once(client: openai.OpenAI) -> None:
    def chain(number: int) -> list[str]:
        first = create(client, input=f"I am number {number}", max_output_tokens=4)
        second = create(client, input="Who?", previous_response_id=first.id, max_output_tokens=4)
        assert client.responses.retrieve(second.id) == second
        items = client.responses.input_items.list(first.id).data
        return [item.content[0].text for item in items]  # type: ignore[union-attr]

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(chain, range(12)))
    assert texts == [[f"I am number {number}"] for number in range(12)]


def test_a_damaged_store_costs_no_answer(own: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "responses.sqlite").write_bytes(b"no database at all" * 100)
    log = tmp_path / "log"
    with (
        serving(own | {"EDGELM_DATA_DIR": str(data)}, log=log) as front,
        openai.OpenAI(base_url=f"{front.address}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client,
    ):
        response = create(client)
        assert response.output_text
        check_not_stored(response, "not a database")
        for event in client.responses.create(model=MODEL, input="hi", max_output_tokens=4, stream=True):
            last = event
        assert last.type in ("response.completed", "response.incomplete")
        check_not_stored(last.response, "not a database")
        with pytest.raises(openai.InternalServerError, match="stored responses cannot be used"):
            client.responses.retrieve(response.id)
    assert "a response is not stored" in log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="no file may grow: RLIMIT_FSIZE by prlimit")
def test_a_full_disk_is_said_in_the_answer(own: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        serving(own | {"EDGELM_DATA_DIR": str(data)}, log=tmp_path / "log") as front,
        openai.OpenAI(base_url=f"{front.address}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client,
    ):
        assert create(client).store is True
        sizes = [file.stat().st_size for file in data.glob("responses.sqlite*")]
        # As on a full disk, no write beyond what is there succeeds; the log file of the front is smaller.
        resource.prlimit(front.process.pid, resource.RLIMIT_FSIZE, (max(sizes), resource.RLIM_INFINITY))
        for _ in range(2):
            check_not_stored(create(client, input=large_input(100_000), store=True), "stored responses")
        resource.prlimit(front.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        stored = create(client)
        assert stored.store is True
        assert client.responses.retrieve(stored.id) == stored


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        create(client, model="no-such-model")
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}])
    assert caught.value.code == "unsupported_content"
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, input="word " * 100_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_an_engine_that_dies_is_an_error_of_the_stream(front: Front, client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model="long", input="hello", max_output_tokens=20_000, stream=True, extra_body=ENDLESS
    )
    assert next(iter(stream)).type == "response.created"
    os.kill(front.ps("long")["pid"], signal.SIGKILL)
    *_, last = stream
    assert last.type == "error"
    assert last.code == "server_error"
    assert last.message
