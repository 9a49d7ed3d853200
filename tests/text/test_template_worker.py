"""Chats rendered in a worker: real ones, hostile templates, and every way in which the worker may end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends.llama.api import start_backend
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import EngineError, ModelError, RequestError
from edgelm.base.workers.parent import Worker
from edgelm.text import template_runner
from edgelm.text.template import ChatTemplate, RefusedError, TooLongError
from edgelm.text.template_runner import TemplateRunner
from tests.text.test_chat import encode_chat
from tests.tiny import write_tiny

MANY = 1_000_000  # bytes
LIMIT_S = 2.0  # for hostile templates: the tests need not wait for the real limit
HI = [{"role": "user", "content": "Hi"}]
# Hostile only to a message that says `bad`.
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
        assert runner._worker is None


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def pid_of(runner: TemplateRunner) -> int:
    assert runner._worker is not None
    return runner._worker.pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie is dead too.
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
async def test_tokens_are_those_of_the_parent_process(template: str | None, tmp_path: Path, start: Any) -> None:
    runner = start(template)
    tokenizer = tokenizer_of(tmp_path, template)
    for text in ("Hi", "", "</s> is <s>, \U00020000\ud800"[:-1], "日本é\n" * 3000, "\\ud840\\udc00<unk>"):
        for options in ({}, {"add_generation_prompt": False, "x": "<s>"}):
            tokens = await runner.render_tokens(say(text), max_bytes=MANY, **options)
            assert tokens == encode_chat(tokenizer, ChatTemplate.of(tokenizer), say(text), **options)


async def test_the_effort_that_was_used_comes_with_each_prompt_of_a_conversation(start: Any) -> None:
    runner = start(
        "{% if reasoning_effort == 'max' %}{{ raise_exception('no effort max') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    )
    messages = say("Hi")
    for _ in range(2):
        prompt = await runner.render_prompt(messages, max_bytes=MANY, template_kwargs={"reasoning_effort": "max"})
        assert prompt.rendered.effort == "xhigh"
        answer = {"role": "assistant", "content": "x"}
        await runner.cache_answer(prompt, [*runner._tokenizer.encode("x", special=False, bos=False)], answer)
        messages = [*messages, answer, *say("And?")]


async def test_one_process_serves_many_requests_at_once(start: Any) -> None:
    runner = start("{{ messages[0].content }}")
    texts = [f"text {number}" for number in range(20)]
    answers = await asyncio.gather(*(runner.render_tokens(say(text), max_bytes=MANY) for text in texts))
    pid = pid_of(runner)
    assert answers == [await runner.render_tokens(say(text), max_bytes=MANY) for text in texts]
    assert pid_of(runner) == pid
    assert len({tuple(tokens) for tokens in answers}) == 20


async def test_no_process_before_the_first_request_and_none_after_closing(start: Any) -> None:
    runner = start("x")
    assert runner._worker is None
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
    requests = [runner.render_tokens(say(word), max_bytes=MANY) for word in ("Hi", "bad", "Hi", "bad", "Hi")]
    first, *others = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(first, list)
    assert [result if isinstance(result, list) else type(result) for result in others] == [
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
        await runner._worker.aexit()
        assert await runner.render_tokens(HI, max_bytes=MANY) == expected


async def test_a_stopped_process_is_killed_after_the_limit(start: Any) -> None:
    runner = start("{{ messages[0].content }}")
    expected = await runner.render_tokens(HI, max_bytes=MANY)
    os.kill(pid_of(runner), signal.SIGSTOP)
    with pytest.raises(RequestError, match="more than 2 s"):
        await runner.render_tokens(HI, max_bytes=MANY)
    assert await runner.render_tokens(HI, max_bytes=MANY) == expected


async def test_a_refused_chat_does_not_end_the_process_later(start: Any) -> None:
    runner = start(TEMPLATE.replace("%s", "{{ raise_exception('No') }}"), limit_s=1)
    with pytest.raises(RefusedError):
        await runner.render_tokens(say("bad"), max_bytes=MANY)
    await asyncio.sleep(2.3)  # its alarm is a second behind the limit
    assert is_alive(pid_of(runner))


async def test_the_time_limit_is_that_of_the_process_and_not_of_busy_threads(start: Any) -> None:
    loop = asyncio.get_running_loop()
    runner = start("{{ messages[0].content }}", limit_s=1)
    await runner.render(HI, max_bytes=MANY)
    loop.set_default_executor(ThreadPoolExecutor(1))
    loop.run_in_executor(None, time.sleep, 0.2)
    request = asyncio.ensure_future(runner.render(HI, max_bytes=MANY))
    await asyncio.sleep(0.1)
    loop.run_in_executor(None, time.sleep, 1.5)  # behind the encoding of the request
    assert (await request).text == "Hi"


@pytest.mark.parametrize(("program", "limit_s"), [("time.sleep(600)", 0.5), ("sys.exit('here is why')", 30)])
async def test_a_process_that_does_not_start_is_an_error(
    program: str, limit_s: float, start: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also with a template larger than a pipe, and its log is shown."""
    command = (sys.executable, "-c", f"import sys, time; {program}")
    monkeypatch.setattr(template_runner, "Worker", partial(Worker, command=command))
    monkeypatch.setattr(template_runner, "START_LIMIT_S", limit_s)
    runner = start("x" * 300_000)
    async with asyncio.timeout(30):
        with pytest.raises(EngineError, match="does not start"):
            await runner.render(HI, max_bytes=MANY)
    assert ("here is why" in capfd.readouterr().err) == ("why" in program)


PARENT = """
import asyncio, sys
from pathlib import Path
from edgelm.text.template_runner import TemplateRunner
from edgelm.backends.llama.tokenizer import LlamaTokenizer

async def main():
    runner = TemplateRunner(LlamaTokenizer.from_file(Path(sys.argv[1])), limit_s=2)
    await runner.render_tokens([{"role": "user", "content": "Hi"}], max_bytes=1000)
    print("child", runner._worker.pid, flush=True)
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


def test_the_child_imports_no_native_engine_and_nothing_of_its_parent() -> None:
    unwanted = {"llama_cpp", "torch", "numpy", "asyncio", "edgelm.base.config"}
    code = f"import sys, edgelm.text.template_worker; print({unwanted} & sys.modules.keys())"
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


SHOWS_ALL = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
    "[{{ c.function.name }}{{ c.function.arguments|tojson }}]{% endfor %}</s>{% endfor %}"
    "{{ tools|tojson if tools }}{{ mood }}{% if add_generation_prompt %}<assistant>{% endif %}"
)


async def test_a_prompt_takes_tools_and_options_for_the_template(start: Any) -> None:
    runner = start(SHOWS_ALL)

    async def text(**options: Any) -> str:
        prompt = await runner.render_prompt(HI, max_bytes=MANY, **options)
        return str(prompt.rendered.text)

    assert await text() == "<s><user>Hi</s><assistant>"
    assert await text(add_generation_prompt=False) == "<s><user>Hi</s>"
    assert await text(template_kwargs={"mood": "glad"}) == "<s><user>Hi</s>glad<assistant>"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert '"name": "f"' in await text(tools=tools)
    for name in ("messages", "tools", "max_bytes", "continue_final_message", "bos_token", "template"):
        with pytest.raises(RequestError, match=f"'{name}' is no option"):
            await text(template_kwargs={name: 1})


async def test_a_prompt_can_continue_the_last_message(start: Any) -> None:
    runner = start(SHOWS_ALL)
    messages = [*HI, {"role": "assistant", "content": "The sky "}]
    prompt = await runner.render_prompt(messages, max_bytes=MANY, continue_final_message=True)
    assert prompt.rendered.text == "<s><user>Hi</s><assistant>The sky "
    assert prompt.num_messages is None
    with pytest.raises(RequestError, match="not an assistant's message"):
        await runner.render_prompt(HI, max_bytes=MANY, continue_final_message=True)


async def test_a_call_that_a_client_spells_anew_keeps_its_tokens(tmp_path: Path, start: Any) -> None:
    runner = start(SHOWS_ALL)
    tokenizer = tokenizer_of(tmp_path, SHOWS_ALL)
    prompt = await runner.render_prompt(HI, max_bytes=MANY)
    answer = tokenizer.encode('Well.  [f{"x":   1}]', special=False, bos=False)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":   1}'}}
    message = {"role": "assistant", "content": "Well.", "tool_calls": [call]}
    await runner.cache_answer(prompt, [*answer, min(tokenizer.stop_ids)], message)
    sent = {**message, "tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": 1}'}}]}
    after = await runner.render_prompt(
        [*HI, sent, {"role": "tool", "tool_call_id": "1", "content": "r"}], max_bytes=MANY
    )
    assert after.ids[: len(prompt.ids) + len(answer)] == [*prompt.ids, *answer]
    assert after.rendered.text.endswith("<tool>r</s><assistant>")


async def test_a_refused_history_has_the_templates_words(start: Any) -> None:
    runner = start("{% if messages|length > 1 %}{{ raise_exception('One message only!') }}{% endif %}")
    with pytest.raises(RefusedError, match="One message only!"):
        await runner.render_prompt([*HI, {"role": "assistant", "content": "a"}], max_bytes=MANY)


async def test_a_variable_of_the_template_may_be_named_self(start: Any) -> None:
    """A client's `chat_template_kwargs` never become arguments of our functions."""
    runner = start("{{ messages[0].content }}{{ worker }}")
    prompt = await runner.render_prompt(HI, max_bytes=MANY, template_kwargs={"self": 1, "worker": "w", "request": 2})
    assert prompt.rendered.text.endswith("w")
