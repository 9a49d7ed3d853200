"""Grammars: what is refused and why, masks, forced tokens, and the state after errors."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import ModelError, RequestError
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec, SchemaRule
from edgelm.engine.sampling.grammar import Grammar, GrammarCompiler, GrammarMatcher
from edgelm.engine.sampling.grammar_checker import MAX_WORKERS
from edgelm.engine.sampling.schema import MAX_SOURCE
from tests.tiny import EOS, write_tiny

NUM_VOCAB = 300
CONTROL, SECOND_STOP = 270, 271
FIRST_WORD = 260
WORDS = ['{"', '": "', '", "', "name", "yes", "no", " a", "\u00e9", "<think>", '"']


class Words:
    """A vocabulary of bytes and some words, with two stop tokens, a control token and ids without a token."""

    num_tokens = 275  # less than the logits have
    stop_ids = frozenset({256, SECOND_STOP})

    def __init__(self) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + [b""] * 4 + [word.encode() for word in WORDS]
        self.pieces += [b""] * (self.num_tokens - len(self.pieces))
        self.names = {256: "<eos>", CONTROL: "<call>", SECOND_STOP: "<end>"}

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        data, ids = text.encode(), []
        while data:
            words = [(len(word.encode()), FIRST_WORD + i) for i, word in enumerate(WORDS)]
            length, token = max(
                [(length, token) for length, token in words if data.startswith(self.pieces[token])] + [(1, data[0])]
            )
            ids.append(token)
            data = data[length:]
        return ids

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def text_of(self, token: int) -> str:
        return self.names.get(token, "")


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(Words(), NUM_VOCAB)
    yield compiler
    await compiler.close()


def schema(document: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(document), **options)


def masks_of(matcher: GrammarMatcher, draft: list[int], num_vocab: int = NUM_VOCAB) -> list[set[int]]:
    rows = np.full((len(draft) + 1, -(-num_vocab // 32)), -1, np.int32)
    matcher.fill(draft, rows)
    return [tokens_of(row) for row in rows]


def tokens_of(row: NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def play(matcher: GrammarMatcher, pieces: Any, rng: random.Random, stop_ids: frozenset[int], most: int = 300) -> str:
    """Return the text of a random walk through the masks, to its end or to so many tokens."""
    text = b""
    for _ in range(most):
        if matcher.done:
            break
        (allowed,) = masks_of(matcher, [], pieces.num_tokens)
        assert matcher.error is None
        assert allowed
        token = rng.choice(sorted(allowed))
        matcher.accept(token)
        assert matcher.error is None, (text, token)
        if token in stop_ids:
            break
        text += pieces.piece(token)
    return text.decode("utf-8", "replace")


CHOICES = ["yes", "no", "a|b", "\n(/.\u00e9", "^"]
FORMAT_IS_A_NAME = {"type": "object", "properties": {"format": {"type": "integer"}}, "required": ["format"]}
PATTERN = {"type": "object", "patternProperties": {"[a-z]": {"type": "string"}}}
CHINESE = {"type": "object", "properties": {"\u540d": {"type": "string"}}}

# -- languages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (GrammarSpec("json_object"), ['{"name": "a"}', "{}"], ["[1]", '{"name":"a"}', '"a"']),
        (GrammarSpec("regex", "[ab]{2,3}"), ["ab", "bbb"], ["a", "abab", "abc"]),
        (GrammarSpec("regex", "^a+$"), ["a", "aa"], ["b", "^a"]),
        (GrammarSpec("choice", json.dumps(CHOICES)), CHOICES, ["a", "y", "yesno"]),
        (GrammarSpec("lark", 'start: "yes" | num\nnum: /[0-9]+/'), ["yes", "12"], ["no", "x"]),
        (GrammarSpec("gbnf", 'root ::= "yes" | "no" [0-9]+'), ["yes", "no7"], ["no"]),
        (GrammarSpec("gbnf", 'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"'), ["- a\n", "- b\n- c\n"], ["-a"]),
        (schema({"type": "integer", "minimum": 3}), ["3", "12"], ["2", "-5"]),
        (schema({"type": "string", "format": "of our house"}), ['"a"'], ["1"]),
        (schema(FORMAT_IS_A_NAME), ['{"format": 1}'], ['{"format": "a"}', "{}"]),
        (schema(PATTERN), ['{"A": 0, "a": ""}', '{"\u540d": 0}'], [r'{"\u540da": 0}', r'{"\u0061": 0}']),
        (schema(CHINESE), ['{"\u540d": "", "a": 0}', '{"a\\n": 0}'], [r'{"\u540d": 0}', '{"\u540d": 0}']),
        (schema(True), ["1", "[]", "null"], ["x"]),
    ],
)  # fmt: skip
async def test_a_grammar_allows_its_language(
    compiler: GrammarCompiler, spec: GrammarSpec, right: list[str], wrong: list[str]
) -> None:
    grammar = await compiler.compile(spec)
    assert grammar.relaxed == ()
    for text in [*right, *wrong]:
        matcher = grammar.matcher()
        tokens = list(text.encode())  # as bytes: any spelling of the text is checked byte by byte
        follows = matcher.allowed(tokens) == len(tokens)
        for token in tokens if follows else ():
            matcher.accept(token)
        complete = follows and (matcher.done or 256 in masks_of(matcher, [])[0])
        assert complete == (text in right), text


async def test_rules_of_a_lark_grammar_may_be_schemas(compiler: GrammarCompiler) -> None:
    lenient = SchemaRule("args", '{"type": "object", "not": {}, "properties": {"a": {"type": "integer"}}}')
    grammar = await compiler.compile(GrammarSpec("lark", f'start: <[{CONTROL}]> "yes" args', rules=(lenient,)))
    assert grammar.relaxed == ("not",)
    matcher = grammar.matcher()
    assert masks_of(matcher, [])[0] == {CONTROL}
    for token in [CONTROL, *b'yes{"a": 1}']:
        matcher.accept(token)
    assert matcher.done
    with pytest.raises(RequestError, match='uses "not"'):
        await compiler.compile(GrammarSpec("lark", "start: a", rules=(SchemaRule("a", '{"not": {}}', strict=True),)))


# -- refusals ----------------------------------------------------------------------------------------------------------

HARD = "((a{1,100}){1,100}){1,100}"  # the lexer reaches a limit within it
UNSUPPORTED = {
    "not": {"not": {}},
    "propertyNames": {"patternProperties": {"b": {}}, "propertyNames": {"pattern": "a"}},
    "oneOf": {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
async def test_a_keyword_that_cannot_be_enforced_is_named(compiler: GrammarCompiler, keyword: str) -> None:
    with pytest.raises(RequestError, match=f'"{keyword}".*cannot be enforced'):
        await compiler.compile(schema(UNSUPPORTED[keyword]))
    relaxed = (await compiler.compile(schema(UNSUPPORTED[keyword], strict=False))).relaxed
    assert relaxed[0] == keyword


STRONGER: dict[str, tuple[Any, str, str]] = {  # a schema, what is written, and what is not
    "const": ({"not": {"const": 3}, "type": "integer"}, "4", "3"),
    "words": ({"not": {"enum": ["a", "bc"]}, "type": "string"}, '"b"', '"bc"'),
    "pattern": ({"not": {"pattern": "^(a|b)"}, "type": "string"}, '"ca"', '"ac"'),
    "not required": ({"not": {"required": ["a"]}, "properties": {"a": {}, "b": {}}}, '{"b": 1}', '{"a": 1}'),
    "dependencies": ({"dependencies": {"a": ["b"]}, "properties": {"a": {}, "b": {}}}, '{"a": 1, "b": 1}', '{"a": 1}'),
    "if": (
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}, "type": "object",
         "properties": {"a": {"type": "integer"}, "b": {}}},
        '{"a": 2}',
        '{"a": 1}',
    ),
    "names": ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab": 1}', '{"b": 1}'),
    "any names": (  # as Zod writes a record
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        '{"b": 1}',
        '{"b": "c"}',
    ),
    "listed names": ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, '{"b": 1}', '{"c": 1}'),
    "oneOf": ({"oneOf": [{"type": "string", "minLength": 2}, {"type": "string"}]}, '"a"', '"ab"'),
    "one key": (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {}, "b": {}}},
        '{"b": 1}',
        '{"a": 1, "b": 1}',
    ),
    "contains": ({"items": {"type": "integer"}, "contains": {"minimum": 5}, "type": "array"}, "[7, 1]", "[1]"),
    "most": ({"contains": {"const": 1}, "maxContains": 1, "type": "array"}, "[1, 2]", "[1, 1]"),
    "floats": ({"type": "string", "maxLength": 2.0}, '"ab"', '"abc"'),
    "unevaluated": (
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False, "type": "object"},
        '{"a": 1}',
        '{"b": 1}',
    ),
    "unique": ({"items": {"type": "integer"}, "uniqueItems": True, "type": "array"}, "[1, 12]", "[1, 1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRONGER)
async def test_keywords_of_no_grammar_are_enforced_by_a_stronger_schema(compiler: GrammarCompiler, name: str) -> None:
    given, written, refused = STRONGER[name]
    grammar = await compiler.compile(schema(given))
    assert not grammar.relaxed

    def ends(text: str) -> bool:
        matcher, tokens = grammar.matcher(), list(text.encode())
        if matcher.allowed(tokens) < len(tokens):
            return False
        for token in tokens:
            matcher.accept(token)
        return matcher.done or bool(set(masks_of(matcher, [])[0]) & Words.stop_ids)

    assert ends(written)
    assert not ends(refused)


async def test_only_what_no_value_conforms_to_is_refused_for_its_items(compiler: GrammarCompiler) -> None:
    items = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    await compiler.compile(schema({**items, "minItems": 2}))
    with pytest.raises(RequestError, match="cannot be enforced"):
        await compiler.compile(schema({**items, "minItems": 3}))


async def test_a_schema_that_is_not_strict_never_fails(compiler: GrammarCompiler) -> None:
    lookahead = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]}
    grammar = await compiler.compile(schema(lookahead, strict=False))
    assert grammar.relaxed == ("pattern",)
    assert grammar.matcher().allowed(list(b'{"a": "')) == 7, "the rest is enforced"
    grammar = await compiler.compile(schema({"type": "frob"}, strict=False))
    assert "whole schema" in grammar.relaxed[0]
    with pytest.raises(RequestError, match="Invalid type: frob"):
        await compiler.compile(schema({"type": "frob"}))


def nested(depth: int) -> dict[str, Any]:
    return {"allOf": [nested(depth - 1)]} if depth else {"type": "string"}


REFUSED = {
    "nested deeper": schema(nested(40)),
    "nested deeper than": GrammarSpec("json_schema", '{"a":' * 30_000 + "1" + "}" * 30_000),
    "is no JSON": GrammarSpec("json_schema", "{"),
    "no JSON object": GrammarSpec("json_schema", "false"),
    "characters": GrammarSpec("regex", "a" * (MAX_SOURCE + 1)),
    "10,000,000 characters": GrammarSpec("choice", "[" + ", ".join(['"v"'] * 2_000_000) + "]"),
    "no list of strings": GrammarSpec("choice", "[]"),
    "half a character": GrammarSpec("choice", '["\\ud800"]'),
    "allows no answer": schema({"$ref": "#/$defs/a", "$defs": {name: {"$ref": f"#/$defs/{name}"} for name in "ab"}}),
    "the regex is not valid": GrammarSpec("regex", "a{2,1}"),
    "lookarounds": GrammarSpec("regex", "a\\b"),
    "max_tokens": GrammarSpec("lark", 'start: "a" b\nb[max_tokens=3]: /.*/'),
    "unknown name": GrammarSpec("lark", "start: foo"),
    "the GBNF grammar is not valid": GrammarSpec("gbnf", "root := yes"),
    "Rule 'nothing' not found": GrammarSpec("gbnf", "root ::= nothing"),
    "nested too deeply": GrammarSpec("gbnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "takes too long": schema({"type": "integer", "multipleOf": 99_999_989}),
    "takes too long to": schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "type": "integer"}),
    "has 15001 items": GrammarSpec("gbnf", "root ::= " + " | ".join(f'"a{i}"' for i in range(15_000))),
    "schema too large": schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(10)]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
async def test_a_hostile_grammar_is_refused_with_the_reason(compiler: GrammarCompiler, reason: str) -> None:
    spec = REFUSED[reason]
    loop = asyncio.get_running_loop()
    slowest, began = asyncio.create_task(slowest_turn()), loop.time()
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=reason):
            await compiler.compile(spec)
    slowest.cancel()
    assert await slowest < max(1.0, (loop.time() - began) / 2), "the event loop waited"
    assert (await compiler.compile(GrammarSpec("regex", "a"))).matcher().allowed([97]) == 1, "the next one is served"


async def slowest_turn() -> float:
    """Return the longest time between two turns of the event loop until it is cancelled."""
    loop, slowest, last = asyncio.get_running_loop(), 0.0, asyncio.get_running_loop().time()
    try:
        while True:
            await asyncio.sleep(0.005)
            now = loop.time()
            slowest, last = max(slowest, now - last), now
    except asyncio.CancelledError:
        return slowest


@pytest.mark.parametrize(
    "regex", ["(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "(a|b)*a(a|b){40}", "(.*a.{9}){9}"]
)
async def test_a_hostile_regex_ends_in_bounded_time(compiler: GrammarCompiler, regex: str) -> None:
    """Either it is followed, or the answer ends with an error: not with a mask that allows the end alone."""
    matcher = (await compiler.compile(GrammarSpec("regex", regex))).matcher()
    accepted = b""
    for token in b"ab" * 100 if "b" in regex else b"a" * 200:
        (mask,) = masks_of(matcher, [])
        if matcher.error:
            assert mask == set()
            assert "too" in matcher.error.lower()
            return
        assert token in mask, accepted
        matcher.accept(token)
        accepted += bytes([token])


async def test_the_same_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    spec = schema({"type": "object", "properties": {"a": {"type": "string"}}})
    first, second = await asyncio.gather(compiler.compile(spec), compiler.compile(spec))
    assert first is second
    assert await compiler.compile(spec) is first
    one, other = first.matcher(), first.matcher()
    one.accept(ord("{"))
    assert other.allowed([ord("{")]) == 1


# -- masks -------------------------------------------------------------------------------------------------------------


async def test_every_stop_token_ends_and_only_a_complete_answer(compiler: GrammarCompiler) -> None:
    matcher = (await compiler.compile(GrammarSpec("regex", "yes( a)?"))).matcher()
    assert not masks_of(matcher, [])[0] & {256, SECOND_STOP}
    matcher.accept(FIRST_WORD + WORDS.index("yes"))
    assert masks_of(matcher, [])[0] >= {256, SECOND_STOP}
    assert not matcher.done
    matcher.accept(FIRST_WORD + WORDS.index(" a"))
    assert matcher.done


async def test_control_tokens_and_padding_are_forbidden(compiler: GrammarCompiler) -> None:
    matcher = (await compiler.compile(GrammarSpec("regex", "(.|\\n)*"))).matcher()
    (mask,) = masks_of(matcher, [])
    assert mask & set(range(256, NUM_VOCAB)) == {256, SECOND_STOP} | set(range(FIRST_WORD, FIRST_WORD + len(WORDS)))


async def test_new_grammars_are_compiled_by_the_same_threads(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """malloc has an arena for each thread: grammars of new threads would leave gaps in all of them."""
    threads: list[threading.Thread] = []

    def compiled(self: GrammarCompiler, checked: CheckedGrammar) -> Grammar:
        threads.append(threading.current_thread())
        return original(self, checked)

    original = GrammarCompiler._compiled
    monkeypatch.setattr(GrammarCompiler, "_compiled", compiled)
    for first in range(0, 12, 3):
        await asyncio.gather(
            *(compiler.compile(GrammarSpec("regex", f"a{number}")) for number in range(first, first + 3))
        )
    assert len(threads) == 12
    assert len(set(threads)) <= MAX_WORKERS
    await compiler.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()


async def test_an_idle_thread_keeps_no_grammar(compiler: GrammarCompiler) -> None:
    grammar = weakref.ref(await compiler.compile(GrammarSpec("regex", "a")))
    compiler._results.clear()
    for _ in range(500):  # the thread may not have come back to its queue yet
        gc.collect()
        if grammar() is None:
            break
        await asyncio.sleep(0.01)
    assert grammar() is None


async def test_a_compile_that_ends_after_close_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(Words(), NUM_VOCAB)
    has_begun, may_end, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def compiled(self: GrammarCompiler, checked: CheckedGrammar) -> Grammar:
        threads.append(threading.current_thread())
        has_begun.set()
        may_end.wait(30)
        return original(self, checked)

    original = GrammarCompiler._compiled
    monkeypatch.setattr(GrammarCompiler, "_compiled", compiled)
    compiling = asyncio.create_task(compiler.compile(GrammarSpec("regex", "a")))
    assert await asyncio.to_thread(has_begun.wait, 30)
    await compiler.close()
    may_end.set()
    await compiling
    await asyncio.to_thread(threads[0].join, 5)
    assert not threads[0].is_alive()


async def test_a_bug_ends_no_thread_that_compiles(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(GrammarCompiler, "_compiled", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await compiler.compile(GrammarSpec("regex", "a"))
    assert await compiler.compile(GrammarSpec("regex", "b"))


async def test_a_kept_refusal_keeps_nothing_of_its_check() -> None:
    made: list[weakref.ref[Words]] = []

    class Refusing:
        async def check(self, _: GrammarSpec) -> None:
            in_use = Words()
            made.append(weakref.ref(in_use))
            raise RequestError("it is refused")

    refusing: Any = Refusing()
    compiler = GrammarCompiler(Words(), NUM_VOCAB, refusing)
    for _ in range(2):
        with pytest.raises(RequestError, match="it is refused"):
            await compiler.compile(GrammarSpec("regex", "a*"))
    await asyncio.sleep(0)  # the event loop's own reference
    gc.collect()
    assert [each() for each in made] == [None]


async def test_a_vocabulary_with_a_very_long_token() -> None:
    words = Words()
    words.pieces[FIRST_WORD] = b"a" * 5000
    compiler = GrammarCompiler(words, NUM_VOCAB)
    (mask,) = masks_of((await compiler.compile(GrammarSpec("regex", "a*"))).matcher(), [])
    assert mask == {ord("a"), 256, SECOND_STOP}
    await compiler.close()


async def test_a_vocabulary_that_the_library_cannot_take_is_an_error_of_grammars() -> None:
    words = Words()
    words.pieces += [b"%d" % number + bytes([97 + number % 26]) * 900 for number in range(5000)]
    words.num_tokens = len(words.pieces)
    compiler = GrammarCompiler(words, words.num_tokens)
    for pattern in ("a*", "b*"):
        with pytest.raises(ModelError, match="vocabulary is not one that grammars can use"):
            await compiler.compile(GrammarSpec("regex", pattern))
    await compiler.close()


async def test_the_vocabulary_is_read_once_by_whoever_needs_it_first() -> None:
    read: list[int] = []

    class Counting(Words):
        def piece(self, token: int) -> bytes:
            read.append(token)
            return super().piece(token)

    compiler = GrammarCompiler(Counting(), NUM_VOCAB)
    assert not read
    specs = [GrammarSpec("regex", pattern) for pattern in ("a*", "b*", "c*")]
    await asyncio.gather(*map(compiler.compile, specs), asyncio.to_thread(compiler.prepare))
    assert read.count(FIRST_WORD) == 1
    await compiler.close()


async def test_a_slow_vocabulary_makes_no_grammar_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Words):
        def piece(self, token: int) -> bytes:
            if token == FIRST_WORD and threading.current_thread() is not threading.main_thread():
                time.sleep(0.5)
            return super().piece(token)

    monkeypatch.setattr("edgelm.engine.sampling.grammar.COMPILE_LIMIT_S", 0.4)
    compiler = GrammarCompiler(Slow(), NUM_VOCAB)
    await compiler.compile(GrammarSpec("regex", "a*"))
    await compiler.close()


async def test_rows_of_a_draft_equal_those_one_by_one(compiler: GrammarCompiler) -> None:
    rng = random.Random(seed := secrets.randbits(32))
    spec = schema({"type": "object", "properties": {"name": {"type": "string"}, "yes": {"enum": ["no", "a", "name"]}}})
    grammar = await compiler.compile(spec)
    for _ in range(60):
        matcher, shadow = grammar.matcher(), grammar.matcher()
        while not matcher.done:
            draft: list[int] = []
            probe = grammar.matcher()
            for token in shadow._accepted:
                probe.accept(token)
            expected = []
            for _ in range(rng.randrange(6)):
                if probe.done:
                    break
                (mask,) = masks_of(probe, [])
                expected.append(mask)
                token = rng.choice(sorted(mask)) if rng.random() < 0.8 else rng.randrange(NUM_VOCAB)
                draft.append(token)
                if token not in mask or token in Words.stop_ids:
                    break
                probe.accept(token)
            forced = matcher.forced(4)
            rows = masks_of(matcher, draft)
            assert rows[: len(expected)] == expected, f"seed {seed}"
            allowed = matcher.allowed(draft)
            assert all(token in mask for token, mask in zip(draft[:allowed], expected, strict=False))
            (mask,) = masks_of(matcher, [])
            if forced:
                assert mask == {forced[0]}, f"seed {seed}"
            token = rng.choice(sorted(mask))
            if token in Words.stop_ids or len(shadow._accepted) > 80:
                break
            matcher.accept(token)
            shadow.accept(token)
            assert matcher.error is None


async def test_a_draft_into_a_state_that_is_too_complex_costs_only_its_rows(compiler: GrammarCompiler) -> None:
    """The error belongs to a text that the model may never write; another answer shares the lexer that failed."""
    grammar = await compiler.compile(GrammarSpec("lark", f'start: HARD | "b" "yes"\nHARD: /{HARD}/'))
    alone, drafted, other = grammar.matcher(), grammar.matcher(), grammar.matcher()
    other.accept(ord("b"))
    rows = masks_of(drafted, list(b"a" * 200))
    assert rows[0] == {ord("a"), ord("b")}
    assert rows[-1] == set()
    assert drafted.error is None
    yes = FIRST_WORD + WORDS.index("yes")
    assert yes in masks_of(other, [])[0]
    other.accept(yes)
    assert other.done
    again = (await compiler.compile(GrammarSpec("lark", f'start: HARD | "b" "yes"\nHARD: /{HARD}/'))).matcher()
    assert masks_of(again, [])[0] == {ord("a"), ord("b")}
    lengths = [steps_to_error(matcher) for matcher in (alone, drafted, again)]
    assert lengths[0] == lengths[1] == lengths[2] > 5, "the end does not depend on drafts and others"


def steps_to_error(matcher: GrammarMatcher) -> int:
    for length in range(2000):
        (mask,) = masks_of(matcher, [])
        if matcher.error:
            assert mask == set()
            assert "too many" in matcher.error
            return length
        matcher.accept(ord("a"))
    raise AssertionError


async def test_forced_tokens_are_canonical_and_bounded(compiler: GrammarCompiler) -> None:
    matcher = (await compiler.compile(schema({"const": {"name": "yes"}}))).matcher()
    forced = matcher.forced(100)
    assert forced == Words().encode('{"name": "yes"}', special=False, bos=False)
    assert matcher.forced(2) == forced[:2]
    for token in forced:
        assert masks_of(matcher, [])[0] == {token}
        matcher.accept(token)
    assert matcher.done
    assert matcher.forced(5) == []


async def test_a_forbidden_token_is_an_error_that_stays(compiler: GrammarCompiler) -> None:
    matcher = (await compiler.compile(GrammarSpec("regex", "abc"))).matcher()
    matcher.accept(ord("x"))
    assert matcher.error
    assert not matcher.done
    assert matcher.forced(3) == []
    assert matcher.allowed([ord("a")]) == 0
    assert masks_of(matcher, [ord("a")]) == [set(), set()]


# -- a vocabulary of llama.cpp -----------------------------------------------------------------------------------------


async def test_a_vocabulary_that_puts_a_space_before_a_text(tmp_path: Path) -> None:
    """A random walk: each token of each mask can be taken, and each finished answer is valid."""
    tokenizer = LlamaTokenizer.from_file(write_tiny(tmp_path / "tiny.gguf", vocab_only=True))
    assert tokenizer.decode(tokenizer.encode("a", special=False, bos=False)) == " a", "else this test shows nothing"
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens)
    document = {
        "type": "object",
        "properties": {"happy": {"type": "boolean"}, "cat": {"enum": ["dog", "tree house"]}, "n": {"type": "integer"}},
        "required": ["happy", "cat", "n"],
        "additionalProperties": False,
    }
    grammar = await compiler.compile(schema(document))
    rng = random.Random(seed := secrets.randbits(32))
    for _ in range(20):
        matcher = grammar.matcher()
        text = play(matcher, tokenizer, rng, frozenset({EOS}))
        if matcher.done:
            jsonschema.validate(json.loads(text), document)
    first = grammar.matcher().forced(9)
    assert tokenizer.decode(first).startswith('{"'), f"seed {seed}"
    await compiler.close()
