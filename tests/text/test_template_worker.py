"""Chats rendered in a process of their own: real ones, hostile templates, and every way that the process may end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from edgelm.errors import EngineError, ModelError, RequestError
from edgelm.executors.llama_api import start_backend
from edgelm.text.chat import encode_chat
from edgelm.text.template import ChatTemplate, RefusedError, TooLongError
from edgelm.text.template_worker import TemplateRunner
from edgelm.text.tokenizer import LlamaTokenizer
from tests.tiny import write_tiny

MANY = 1_000_000  # bytes
LIMIT_S = 2.0  # of the hostile ones: the tests need not wait for the real limit
HI = [{"role": "user", "content": "Hi"}]
# Behaves, but for the user who says a word of the template's own.
TEMPLATE = """{{ bos_token }}{% set word = messages[-1].content %}{% if word == 'bad' %}%s{% endif %}{{ word }}"""
LOOP = "{% for _ in range(100000) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
ONE_CALL = "{{ (9 ** (9 ** (7 + messages|length))) % 7 }}"  # holds the interpreter's lock: no thread could stop it


@pytest.fixture(autouse=True)
def _silence() -> None:
    start_backend()


def tokenizer_of(folder: Path, template: str | None) -> LlamaTokenizer:
    return LlamaTokenizer.from_file(write_tiny(folder / "tiny.gguf", vocab_only=True, chat_template=template))


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., TemplateRunner]]:
    runners: list[TemplateRunner] = []

    def make(template: str | None, limit_s: float = LIMIT_S) -> TemplateRunner:
        runners.append(TemplateRunner(tokenizer_of(tmp_path, template), limit_s=limit_s))
        return runners[-1]

    yield make
    for runner in runners:
        await runner.close()
        assert runner._process is None


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def pid_of(runner: TemplateRunner) -> int:
    assert runner._process is not None
    return runner._process.pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that nobody has waited for yet is dead too.
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


async def gone(pid: int, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while is_alive(pid):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True


@pytest.mark.parametrize("template", ["{{ bos_token }}[{{ messages[0].content }}]{{ x }}", None])
async def test_tokens_are_those_of_encode_chat(template: str | None, tmp_path: Path, start: Any) -> None:
    runner = start(template)
    tokenizer = tokenizer_of(tmp_path, template)
    for text in ("Hi", "", "</s> is <s>, \U00020000\ud800"[:-1], "日本é\n" * 3000, "\\ud840\\udc00<unk>"):
        for options in ({}, {"add_generation_prompt": False, "x": "<s>"}):
            found = await runner.render_tokens(say(text), max_bytes=MANY, **options)
            assert found == encode_chat(tokenizer, ChatTemplate.of(tokenizer), say(text), **options)


async def test_one_process_serves_many_requests_at_once(start: Any) -> None:
    runner = start("{{ messages[0].content }}")
    texts = [f"text {number}" for number in range(20)]
    found = await asyncio.gather(*(runner.render_tokens(say(text), max_bytes=MANY) for text in texts))
    pid = pid_of(runner)
    assert found == [await runner.render_tokens(say(text), max_bytes=MANY) for text in texts]
    assert pid_of(runner) == pid
    assert len({tuple(each) for each in found}) == 20


async def test_no_process_before_the_first_request_and_none_after_closing(start: Any) -> None:
    runner = start("x")
    assert runner._process is None
    await runner.render_tokens(HI, max_bytes=MANY)
    pid = pid_of(runner)
    await runner.close()
    assert not is_alive(pid)
    with pytest.raises(EngineError, match="unloaded"):
        await runner.render_tokens(HI, max_bytes=MANY)


@pytest.mark.parametrize(
    ("evil", "kind", "words"),
    [
        (ENDLESS, RequestError, "took more than 2 s"),
        (ONE_CALL, RequestError, "took more than 2 s"),
        ("{{ 'a' * 10**10 if messages else '' }}", RequestError, "memory ran out"),
        (DOUBLING, RequestError, "memory ran out|took more than 2 s"),  # whichever a busy machine comes to first
        ("{{ 'x'.ljust(10**10) }}", RequestError, "memory ran out"),
        ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", TooLongError, "more than 1,000,000 bytes"),
        ("{{ ''.__class__.__mro__ }}", ModelError, "__class__"),
        ("{{ cycler.__init__.__globals__.os }}", ModelError, "__init__"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RequestError, "RecursionError"),
        ("{{ raise_exception('No <such>\nword') }}", RefusedError, "No <such> word"),
        ("{{ none + 1 }}", RequestError, "TypeError"),
    ],
)  # fmt: skip
async def test_a_hostile_template_is_one_failed_request(
    evil: str, kind: type[Exception], words: str, start: Any
) -> None:
    if sys.platform != "linux" and words.startswith("memory ran out"):
        pytest.skip("only Linux limits the memory of a process")
    runner = start(TEMPLATE.replace("%s", evil))
    expected = await runner.render_tokens(HI, max_bytes=MANY)
    with pytest.raises(kind, match=words) as caught:
        await runner.render_tokens(say("bad"), max_bytes=MANY)
    assert "\n" not in str(caught.value)
    assert await runner.render_tokens(HI, max_bytes=MANY) == expected


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("{% if %}", ModelError, "is broken: line 1"),
        ("{{ x | nothing }}", ModelError, "No filter named 'nothing'"),
        ("{{ 'a' * 10**10 }}", RequestError, "memory ran out"),  # jinja2 computes constants when it compiles
        ("{{ 9 ** (9 ** 9) }}", RequestError, "took more than 2 s"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ModelError, "is broken"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, ModelError, "is broken"),
    ],
)
async def test_a_template_that_cannot_be_compiled_fails_each_request(
    source: str, kind: type[Exception], words: str, start: Any
) -> None:
    runner = start(source)
    for _ in range(2):
        with pytest.raises(kind, match=words):
            await runner.render_tokens(HI, max_bytes=MANY)


async def test_other_requests_wait_for_a_slow_one_and_then_are_served(start: Any) -> None:
    runner = start(TEMPLATE.replace("%s", ENDLESS))
    asked = [runner.render_tokens(say(word), max_bytes=MANY) for word in ("Hi", "bad", "Hi", "bad", "Hi")]
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, list)
    assert [each if isinstance(each, list) else type(each) for each in others] == [
        RequestError,
        first,
        RequestError,
        first,
    ]


async def test_the_event_loop_runs_while_a_template_does(start: Any) -> None:
    runner = start(TEMPLATE.replace("%s", ONE_CALL))
    request = asyncio.ensure_future(runner.render_tokens(say("bad"), max_bytes=MANY))
    turns = 0
    while not request.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 10
    assert isinstance(request.exception(), RequestError)


async def test_a_cancelled_request_ends_the_process_and_the_next_starts_another(start: Any) -> None:
    runner = start(TEMPLATE.replace("%s", ENDLESS), limit_s=60)
    expected = await runner.render_tokens(HI, max_bytes=MANY)
    pid = pid_of(runner)
    request = asyncio.ensure_future(runner.render_tokens(say("bad"), max_bytes=MANY))
    await asyncio.sleep(0.2)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert not is_alive(pid)
    assert await runner.render_tokens(HI, max_bytes=MANY) == expected


async def test_a_waiting_request_can_be_cancelled_alone(start: Any) -> None:
    runner = start(TEMPLATE.replace("%s", ENDLESS))
    expected = await runner.render_tokens(HI, max_bytes=MANY)
    pid = pid_of(runner)
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(
            asyncio.wait([asyncio.ensure_future(runner.render_tokens(say("bad"), max_bytes=MANY))])
        )
        waiting = asyncio.ensure_future(runner.render_tokens(HI, max_bytes=MANY))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.sleep(0)
        assert pid_of(runner) == pid
    ((failed,), _) = slow.result()
    assert isinstance(failed.exception(), RequestError)
    assert await runner.render_tokens(HI, max_bytes=MANY) == expected


async def test_closing_ends_a_rendering(start: Any) -> None:
    runner = start(TEMPLATE.replace("%s", ENDLESS), limit_s=60)
    await runner.render_tokens(HI, max_bytes=MANY)
    pid = pid_of(runner)
    request = asyncio.ensure_future(runner.render_tokens(say("bad"), max_bytes=MANY))
    await asyncio.sleep(0.2)
    await runner.close()
    with pytest.raises(ModelError):
        await request
    assert not is_alive(pid)


async def test_a_process_killed_in_a_request_fails_it_and_the_next_works(start: Any) -> None:
    runner = start(TEMPLATE.replace("%s", ENDLESS), limit_s=60)
    expected = await runner.render_tokens(HI, max_bytes=MANY)
    request = asyncio.ensure_future(runner.render_tokens(say("bad"), max_bytes=MANY))
    await asyncio.sleep(0.2)
    os.kill(pid_of(runner), signal.SIGTERM)
    with pytest.raises(ModelError, match="SIGTERM"):
        await request
    assert await runner.render_tokens(HI, max_bytes=MANY) == expected


async def test_a_process_killed_between_requests_is_not_noticed(start: Any) -> None:
    runner = start("{{ messages[0].content }}")
    expected = await runner.render_tokens(HI, max_bytes=MANY)
    for _ in range(3):
        os.kill(pid_of(runner), signal.SIGKILL)
        await runner._process.wait()
        assert await runner.render_tokens(HI, max_bytes=MANY) == expected


async def test_a_stopped_process_is_killed_after_the_limit(start: Any) -> None:
    runner = start("{{ messages[0].content }}")
    expected = await runner.render_tokens(HI, max_bytes=MANY)
    os.kill(pid_of(runner), signal.SIGSTOP)
    with pytest.raises(RequestError, match="more than 2 s"):
        await runner.render_tokens(HI, max_bytes=MANY)
    assert await runner.render_tokens(HI, max_bytes=MANY) == expected


PARENT = """
import asyncio, sys
from pathlib import Path
from edgelm.text.template_worker import TemplateRunner
from edgelm.text.tokenizer import LlamaTokenizer

async def main():
    runner = TemplateRunner(LlamaTokenizer.from_file(Path(sys.argv[1])), limit_s=2)
    await runner.render_tokens([{"role": "user", "content": "Hi"}], max_bytes=1000)
    print("child", runner._process.pid, flush=True)
    await runner.render_tokens([{"role": "user", "content": sys.argv[2]}], max_bytes=1000)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(("word", "evil"), [("Hi", ""), ("bad", ENDLESS), ("bad", ONE_CALL)])
async def test_no_process_is_left_when_the_parent_is_killed(word: str, evil: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", vocab_only=True, chat_template=TEMPLATE.replace("%s", evil))
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(model), word, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    try:
        child = 0
        async for line in parent.stdout:
            if line.startswith(b"child"):
                child = int(line.split()[1])
                break
        assert is_alive(child)
        await asyncio.sleep(0.3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        await parent.wait()
    assert await gone(child, within_s=30)


def test_the_child_imports_no_native_engine() -> None:
    code = "import sys, edgelm.text.template_worker; print({'llama_cpp', 'torch', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


async def test_messages_that_are_nested_too_deep_are_refused(start: Any) -> None:
    runner = start("{{ messages[0].content }}")
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        await runner.render_tokens(HI, max_bytes=MANY, documents=deep)
    await runner.render_tokens(HI, max_bytes=MANY)
