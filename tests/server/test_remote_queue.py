"""Which server takes the next request of a remote model, who waits, and how many requests a server gets at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.base.errors import BusyError, UsageError
from edgelm.base.model_tables import ModelTable, parse_tables
from edgelm.server.api.errors import ApiError
from edgelm.server.remotes import models as remote_models
from edgelm.server.remotes.boxes import FIRST_LIMIT, LEAST_LIMIT, MAX_LIST_BYTES, SLOW_S, Box, BoxError, has_proxy
from edgelm.server.remotes.models import MAX_REQUESTS, MAX_TRIES, RemoteModel, Remotes
from tests.library.proxies import Proxy
from tests.server.fake_remote import Asked, remote_server
from tests.server.harness import LIMIT_S

HERE = ["http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1"]
MAX_TURNS = 1000  # of the loop, until every request has ended
# What happens in one turn of the loop: requests of clients come, and some of those that came are cancelled or answered.
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from("abc")),
    st.tuples(st.sampled_from(["cancel", "answer"]), st.integers(0, 9)),
)


def tables_of(**entries: Any) -> tuple[ModelTable, ...]:
    return parse_tables({"big": entries}, "config.toml", {})


def model_at(*endpoints: str) -> RemoteModel:
    return Remotes(tables_of(endpoint=list(endpoints))).models[0]


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_least_busy_server_is_next() -> None:
    model = model_at(*HERE)
    async with AsyncExitStack() as stack:
        given = [await stack.enter_async_context(model.turn("a", ())) for _ in range(4)]
        assert [box.num_open for box in model.boxes] == [2, 2]
        assert given[0] is not given[1]
    assert model.num_running == 0


async def test_one_that_is_down_comes_last() -> None:
    model = model_at(*HERE)
    first, second = model.boxes
    first.failed("down", "it is off")
    async with model.turn("a", ()) as box:
        assert box is second
    async with model.turn("a", [second]) as box:
        assert box is first, "there is no other"
    assert model.state == "ready"
    first.is_well()
    assert not first.problem


async def test_clients_take_turns_where_all_servers_are_busy() -> None:
    model = model_at(HERE[0])
    (box,) = model.boxes
    box.limit = 1.0
    order: list[str] = []

    async def one(client: str) -> None:
        async with model.turn(client, ()):
            order.append(client)
            await asyncio.sleep(0)

    async with model.turn("first", ()):
        waiting = [asyncio.create_task(one(client)) for client in ("a", "a", "a", "b", "c")]
        await settled()
        assert model.num_waiting == 5
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c", "a", "a"]
    assert (model.num_waiting, box.num_open) == (0, 0)


async def test_a_client_that_leaves_the_queue_keeps_no_place() -> None:
    model = model_at(HERE[0])
    model.boxes[0].limit = 1.0

    async def wait() -> None:
        async with model.turn("b", ()):
            pass

    async with model.turn("a", ()):
        leaving, given = asyncio.create_task(wait()), asyncio.create_task(wait())
        await settled()
        leaving.cancel()
        await settled()
        assert model.num_waiting == 1
    given.cancel()  # in the moment in which it gets its turn
    await asyncio.wait([leaving, given])
    assert (model.num_waiting, model.num_running) == (0, 0)


async def test_requests_that_are_cancelled_together_leave_their_server_to_the_next_one() -> None:
    model = model_at(HERE[0])
    (box,) = model.boxes
    box.limit = 1.0

    async def use() -> None:
        async with model.turn("program", ()):
            await asyncio.Event().wait()

    running, waiting = asyncio.create_task(use()), asyncio.create_task(use())
    await settled()
    running.cancel()
    waiting.cancel()
    ends = await asyncio.gather(running, waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
    assert (model.num_waiting, box.num_open) == (0, 0)
    async with asyncio.timeout(LIMIT_S), model.turn("another", ()) as given:
        assert given is box


@given(servers=st.integers(1, 2), moments=st.lists(st.lists(STEPS, max_size=8), max_size=8))
def test_no_request_starves_and_no_server_stays_taken(servers: int, moments: list[list[tuple[str, Any]]]) -> None:
    async def main() -> None:
        model = model_at(*HERE[:servers])
        for box in model.boxes:
            box.limit = 1.0
        requests: list[asyncio.Task[None]] = []
        answers: list[asyncio.Event] = []
        cancelled = set[asyncio.Task[None]]()

        async def use(client: str, answer: asyncio.Event) -> None:
            async with model.turn(client, ()) as box:
                assert box.num_open == 1
                await answer.wait()

        for moment in moments:
            for step, of in moment:
                if step == "ask":
                    answers.append(asyncio.Event())
                    requests.append(asyncio.create_task(use(of, answers[-1])))
                elif requests and step == "cancel":
                    request = requests[of % len(requests)]
                    if request.cancel():
                        cancelled.add(request)
                elif requests:
                    answers[of % len(requests)].set()
            await asyncio.sleep(0)
        for answer in answers:
            answer.set()
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
        assert [request for request in requests if not request.done()] == [], "these starve"
        assert {request for request in requests if request.cancelled()} == cancelled
        assert [request.exception() for request in requests if not request.cancelled() and request.exception()] == []
        assert (model.num_waiting, model.num_running) == (0, 0)

    asyncio.run(main())


def test_a_client_has_at_most_half_of_the_places() -> None:
    model = model_at(HERE[0])
    with ExitStack() as stack:
        for _ in range(MAX_REQUESTS // 2):
            stack.enter_context(model.admitted("a"))
        with pytest.raises(BusyError, match="of this client"), model.admitted("a"):
            pass
        with model.admitted("b"):
            pass


async def test_the_limit_of_a_server_is_learnt_from_refusals_and_answers() -> None:
    (box,) = model_at(HERE[0]).boxes
    now = asyncio.get_running_loop().time
    box.num_open = 8
    sent = now()
    assert box.refused(sent)
    assert box.limit == 4
    assert box.refused(sent - 1)
    assert box.limit == 4, "one cut for all that were under way"
    box.num_open = 4
    for _ in range(5):
        box.answered(now(), 0.1, 100)
    assert 5 <= box.limit < 6
    box.num_open = 1
    limit = box.limit
    box.answered(now(), 0.1, 100)
    assert box.limit == limit, "it was not reached"
    assert not box.refused(now() + 1), "it has nothing else, and takes not even one"


async def test_after_the_last_refusal_the_client_gets_it() -> None:
    model = model_at(*HERE)
    for box in model.boxes:
        box.num_open = 3  # of other clients
    num_tries = 0

    async def refused(box: Box, sent_at: float) -> AsyncGenerator[str, None]:
        nonlocal num_tries
        num_tries += 1
        await asyncio.sleep(0.001)
        box.refused(sent_at)  # another client's request too, whose answers then raise the limit
        box.limit = FIRST_LIMIT
        raise BoxError("busy", ApiError(429, "remote_busy", f"refusal {num_tries}"))
        yield ""

    with pytest.raises(ApiError, match=f"refusal {MAX_TRIES}") as caught:
        _ = [part async for part in model.first_answer("a", refused)]
    assert caught.value.status == 429


async def test_slow_first_tokens_lower_the_limit_but_not_to_one() -> None:
    (box,) = model_at(HERE[0]).boxes
    box.num_open = int(FIRST_LIMIT)
    box.answered(0.0, 0.1, 100)
    for turn in range(60):
        box.answered(asyncio.get_running_loop().time() + 1000 + turn, 10 * SLOW_S, 100)
    assert box.limit == LEAST_LIMIT


@pytest.mark.parametrize(("breaks", "num_sent"), [((1,), 1), ((2,), 3), ((2, 3), 3)])
async def test_a_request_is_repeated_once_where_its_connection_was_kept(breaks: tuple[int, ...], num_sent: int) -> None:
    """`breaks` are the requests, of those that the server gets, at which it closes the connection."""

    def answer(asked: Asked) -> None:
        if len(asked.seen) in breaks:
            asked.close_connection = True
        else:
            asked.say(200, {})

    with remote_server({"box": answer}) as (address, seen):
        (box,) = model_at(f"{address}/box/v1").boxes
        ends: list[bytes | str] = []
        for _ in range(1 if 1 in breaks else 2):
            try:
                ends.append(await box.document("/chat/completions", {}, 0))
            except BoxError as error:
                ends.append(error.error.code)
        await box.close()
    assert ends[-1] == (b"{}" if breaks == (2,) else "remote_unreachable")
    assert len(seen) == num_sent


async def test_https_to_another_machine_goes_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    assert not has_proxy("https://box.invalid/v1")
    with Proxy("http", refuses=True) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        assert not has_proxy("https://127.0.0.1:9/v1"), "it cannot reach this machine's own ports"
        assert not has_proxy("http://box.invalid:8000/v1"), "it would read along"
        (box,) = model_at("https://box.invalid/v1").boxes
        await box.check()
        await box.close()
    assert proxy.addresses == [("box.invalid", 443)]
    assert "cannot be reached" in box.problem or "does not speak HTTP" in box.problem


async def test_a_list_of_models_without_end_is_a_failed_check() -> None:
    with remote_server({"big models": lambda asked: asked.say(200, b" " * (MAX_LIST_BYTES + 1))}) as (address, _):
        (box,) = model_at(f"{address}/big/v1").boxes
        await box.check()
        assert "does not list its models" in box.problem
        await box.close()


async def test_a_check_that_fails_by_a_bug_is_logged_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_models, "CHECK_S", 0.0)
    monkeypatch.setattr(remote_models, "TICK_S", 0.0)
    remotes = Remotes(tables_of(endpoint=HERE))
    first, second = remotes.models[0].boxes
    num_checks = 0
    enough = asyncio.Event()

    async def broken() -> None:
        raise ZeroDivisionError("of a bug")

    async def counted() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 3:
            enough.set()

    monkeypatch.setattr(first, "check", broken)
    monkeypatch.setattr(second, "check", counted)
    async with asyncio.timeout(LIMIT_S), remotes:
        await enough.wait()
    assert "ZeroDivisionError" in first.problem
    assert not second.problem
    assert "of a bug" in caplog.text


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"endpoint": "ftp://box/v1"}, "is not an endpoint"),
        ({"endpoint": "http://me:secret@box/v1"}, "a name or password"),
        ({"endpoint": [HERE[0], HERE[0]]}, "twice"),
        ({"endpoint": "http://box:8000/v1", "headers": {"Authorization": "Bearer secret"}}, "unencrypted"),
        ({"endpoint": HERE[0], "headers": {"Host": "other"}}, "headers has Host"),
        ({"endpoint": HERE[0], "api_key_file": "/nowhere/key"}, "cannot be read"),
        ({"endpoint": "https://box/v1", "ca_file": "/nowhere/ca.pem"}, "cannot be read"),
        ({"endpoint": HERE[0], "ctx": 4096}, "no setting ctx"),
        ({"endpoint": []}, "endpoint is empty"),
        ({"endpoint": HERE[0], "timeout": 0}, "timeout is 0"),
        ({"endpoint": HERE[0], "headers": {"X": "secret\n"}}, "names of headers"),
        ({"model": "x"}, "needs an endpoint"),
    ],
)
def test_what_is_wrong_is_said_at_start(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Remotes(tables_of(**entries))
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def private(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("endpoint", "is_refused"),
    [
        ("http://box:8000/v1", True),
        ("http://192.168.1.5/v1", True),
        ("http://127.0.0.1:8000", False),
        ("http://localhost:8000/v1", False),
        ("https://box/v1", False),
    ],
)
def test_a_key_goes_over_plain_http_to_this_machine_only(tmp_path: Path, endpoint: str, is_refused: bool) -> None:
    def make() -> Remotes:
        return Remotes(tables_of(endpoint=endpoint, api_key_file=private(tmp_path / "key", "abcdefgh\n")))

    if is_refused:
        with pytest.raises(UsageError, match="unencrypted"):
            make()
    else:
        assert make().find("BIG:latest") is not None


@pytest.mark.parametrize("text", ["", "two words\n", "one\ntwo\n", "\u00e4\n"])
def test_a_key_file_has_one_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="not a key alone"):
        Remotes(tables_of(endpoint=HERE[0], api_key_file=private(tmp_path / "key", text)))


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abcdefgh")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others can read"):
        Remotes(tables_of(endpoint=HERE[0], api_key_file=str(file)))


def test_an_alias_belongs_to_one_model() -> None:
    tables = {name: {"endpoint": HERE[0], "alias": "x"} for name in "ab"}
    with pytest.raises(UsageError, match="is a name of"):
        parse_tables(tables, "config.toml", {})
