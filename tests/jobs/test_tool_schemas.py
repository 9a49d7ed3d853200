"""The checks of tools' schemas: their budget, what is kept, and that nothing else waits for them."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from edgelm.backends.model import LoadedModel
from edgelm.base.errors import RequestError
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec
from edgelm.engine.sampling.grammar_checker import GrammarChecker
from edgelm.engine.sampling.grammar_worker import check_grammar
from edgelm.jobs.tool_schemas import MAX_CHECKS, MAX_KEPT, ToolSchemas
from tests.real_data import template
from tests.served import loaded_model, served
from tests.tiny import write_tiny

TEMPLATE = "Qwen-Qwen3-0.6B"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def function(number: int, keywords: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    value = {"type": "integer", "minimum": number, **(keywords or {})}
    return {"name": f"f{number}", "parameters": {"type": "object", "properties": {"a": value}}, **more}


def endless(number: int, **more: Any) -> dict[str, Any]:
    """A schema whose automaton has as many states as a large prime."""
    return function(number, {"multipleOf": 99_999_989}, **more)


class Checks:
    """Checks in this process that take as long as they are told, and are counted."""

    def __init__(self, cpu_s: float = 0.0) -> None:
        self.count = 0
        self._cpu_s = cpu_s

    async def __call__(self, spec: GrammarSpec) -> CheckedGrammar:
        self.count += 1
        if "multipleOf" in spec.source:
            raise RequestError("the grammar takes too long to compile", "simplify it")
        checked = check_grammar(spec)
        return CheckedGrammar(checked.grammar, checked.relaxed, self._cpu_s)


async def test_a_kept_refusal_keeps_nothing_of_its_check() -> None:
    made: list[weakref.ref[Checks]] = []

    async def check(_: GrammarSpec) -> CheckedGrammar:
        in_use = Checks()
        made.append(weakref.ref(in_use))
        raise RequestError("it is refused")

    schemas = ToolSchemas(check)
    for _ in range(2):
        with pytest.raises(RequestError, match="it is refused"):
            await schemas.of([function(1, strict=True)])
    gc.collect()
    assert [each() for each in made] == [None]


async def test_a_schema_that_ends_its_check_is_tried_once() -> None:
    schemas = ToolSchemas(checks := Checks())
    for _ in range(3):
        fitted = await schemas.of([endless(1), function(2)])
        assert fitted["f1"].schema == {"type": "object"}
        assert "too long" in fitted["f1"].relaxed
        closed = {**function(2)["parameters"], "additionalProperties": False}
        assert (fitted["f2"].schema, fitted["f2"].relaxed) == (closed, "")
    assert checks.count == 2


async def test_beyond_the_processor_time_of_a_request_schemas_are_not_checked() -> None:
    fitted = await ToolSchemas(checks := Checks(cpu_s=1.5)).of([function(number) for number in range(9)])
    assert checks.count == 3
    assert [bool(fitted[f"f{number}"].relaxed) for number in range(9)] == [False] * 3 + [True] * 6
    assert fitted["f8"].schema == {"type": "object"}


async def test_beyond_the_number_of_checks_schemas_are_not_checked() -> None:
    schemas = ToolSchemas(checks := Checks())
    many = [function(number) for number in range(MAX_CHECKS + 3)]
    assert sum(bool(schema.relaxed) for schema in (await schemas.of(many)).values()) == 3
    assert not any(schema.relaxed for schema in (await schemas.of(many)).values()), "what is kept costs nothing"
    assert checks.count == len(many)


async def test_a_strict_tool_is_checked_first_and_its_error_names_it() -> None:
    schemas = ToolSchemas(checks := Checks(cpu_s=1.5))
    fitted = await schemas.of([*(function(number) for number in range(5)), function(9, strict=True)])
    assert not fitted["f9"].relaxed
    for _ in range(2):
        with pytest.raises(RequestError, match="strict tool f1 cannot be enforced: the grammar takes too long"):
            await schemas.of([endless(1, strict=True)])
    assert checks.count == 4
    with pytest.raises(RequestError, match=r"strict tool f8 .* take too long to check"):
        await ToolSchemas(Checks(cpu_s=5)).of([function(7, strict=True), function(8, strict=True)])


async def test_an_error_speaks_of_the_json_schema() -> None:
    odd = {"name": "odd", "parameters": {"type": "objct"}}
    fitted = await ToolSchemas(Checks()).of([odd])
    assert fitted["odd"].schema["type"] == "object"
    assert "Invalid type: objct" in fitted["odd"].relaxed
    with pytest.raises(RequestError) as caught:
        await ToolSchemas(Checks()).of([{**odd, "strict": True}])
    assert "strict tool odd" in caught.value.message
    assert "JSON schema" in caught.value.message
    assert "Lark" not in str(caught.value)


async def test_a_client_that_leaves_ends_its_check() -> None:
    checker = GrammarChecker()
    try:
        task = asyncio.create_task(ToolSchemas(checker.check).of([endless(1), endless(2)]))
        await asyncio.sleep(0.1)  # the worker is being started, or has the first schema
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not checker._workers
    finally:
        await checker.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    source = template(TEMPLATE)
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", chat_template=source, context=4096)
    with loaded_model(path) as loaded:
        yield loaded


async def test_a_chat_does_not_wait_for_the_schemas_of_others(model: LoadedModel) -> None:
    """Not while they are checked, which takes some 16 s here, and not after their clients have left."""
    async with served(model) as edgelm:

        async def hostile(first: int) -> None:
            tools: Any = [{"type": "function", "function": endless(first * 4 + number)} for number in range(4)]
            await edgelm.client.chat.completions.create(model="m", messages=MESSAGES, tools=tools, max_tokens=1)

        async def chat_s() -> float:
            began = time.monotonic()
            await edgelm.client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=1)
            return time.monotonic() - began

        await chat_s()  # starts the process of templates
        limit_s = 5 + 20 * await chat_s()  # a busy machine is not a failure
        tasks = [asyncio.create_task(hostile(number)) for number in range(8)]
        await asyncio.sleep(2)
        assert not any(task.done() for task in tasks)
        assert await chat_s() < limit_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await chat_s() < limit_s


async def test_small_schemas_are_kept_up_to_a_number() -> None:
    """Four million characters of small ones were 20,000 results, of kilobytes each."""
    schemas = ToolSchemas(checks := Checks())
    for number in range(MAX_KEPT + 1):
        await schemas.of([function(number)])
    await schemas.of([function(MAX_KEPT)])
    assert checks.count == MAX_KEPT + 1
    await schemas.of([function(0)])
    assert checks.count == MAX_KEPT + 2, "the first was forgotten"
