"""Random requests for tool calls and JSON, and the check of their answers: for test_structured_answers.py.

Owns the templates, the schemas and the judgement of an answer. Knows no backend.
"""

from __future__ import annotations

import decimal
import json
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import RequestError
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.engine.sampling.grammar import GrammarCompiler
from edgelm.jobs.answer import Answerer
from edgelm.jobs.request import AnswerRequest
from edgelm.text.calls.derive import find_support
from edgelm.text.calls.format import Call, CallFormat, ToolChoice, write_calls
from edgelm.text.calls.generic import GENERIC
from edgelm.text.calls.known import KNOWN
from edgelm.text.chat import Rendered
from edgelm.text.parse import Part
from edgelm.text.template import ChatTemplate
from edgelm.text.template_runner import TemplateRunner
from edgelm.text.tokenizer import Tokenizer
from tests.real_data import data_file
from tests.text.calls.random_calls import THINK, Answer, collected, control_strings
from tests.tiny import WORDS, write_tiny

FORMS: list[tuple[tuple[str, ...], CallFormat]] = [*KNOWN, ((), GENERIC)]
MARKS = sorted({mark for _, form in FORMS for mark in control_strings(form, THINK)})
HARMONY_MARKS = next(control_strings(form, None) for _, form in KNOWN if form.body == "harmony")
NAMES = ("find", "get_weather", "x2", "a-b_c")
MAX_TOKENS = 400
ENDS = frozenset(('"', '"}', "}", "]", ")", "'", "\n", ">", "/", "<"))


def write_model(path: Path, seed: int) -> Path:
    """Write a tiny random model whose vocabulary has the marks of all formats, as control tokens or as text."""
    rng = random.Random(seed)
    control = [mark for mark in MARKS if mark in HARMONY_MARKS or rng.random() < 0.7]
    rng.shuffle(control)
    text = [mark for mark in MARKS if mark not in control]
    return write_tiny(
        path,
        context=4096,
        quant="q8_0",
        width=64,
        ffn=128,
        vocab_size=420 + len(MARKS),
        seed=seed,
        control=tuple(control),
        user_defined=tuple(text),
    )


class Templates(TemplateRunner):
    """A template that writes calls in one format, without a process."""

    def __init__(self, tokenizer: Tokenizer, number: int, *, thinks: bool) -> None:
        super().__init__(tokenizer)
        marks, self.form = FORMS[number]
        self._writes = bool(marks)
        thoughts = THINK.strings if thinks else ()
        example = write_calls(self.form, [Call("NAME", {"KEY": "VALUE", "OTHER": 1})]) if marks else ""
        self.source = ChatTemplate("\n".join(("{{ messages }}", *marks, *thoughts, example)))

    async def template(self) -> ChatTemplate:
        return self.source

    async def render(self, messages: Any, *, tools: Any = None, **_: Any) -> Rendered:
        return Rendered(self.text(messages, tools))

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        text = "".join(tool["function"]["name"] + " " for tool in tools or ())
        for message in messages:
            text += str(message.get("content") or "")[-80:]
            if self._writes and message.get("tool_calls"):
                calls = [(call["function"], call["id"]) for call in message["tool_calls"]]
                text += write_calls(self.form, [Call(one["name"], one["arguments"], name) for one, name in calls])
        return text


class _Tokenizer:
    """A tokenizer that knows of some marks only: the others are text."""

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str]) -> None:
        self._tokenizer = tokenizer
        self.special_strings = tokenizer.special_strings & frozenset(marks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Answerers:
    """The Answerers of one model, for each format."""

    def __init__(self, loaded: LoadedModel, grammars: GrammarCompiler) -> None:
        self._loaded = loaded
        self._grammars = grammars
        self._made: dict[tuple[int, bool], Answerer] = {}
        pieces = [loaded.tokenizer.piece(token) for token in range(loaded.tokenizer.num_tokens)]
        ends = {token: 8.0 for token, piece in enumerate(pieces) if piece.decode("latin-1") in ENDS}
        self._ends = ends | dict.fromkeys(loaded.tokenizer.stop_ids, 9.0)

    def bias(self, number: int, *, thinks: bool) -> tuple[tuple[int, float], ...]:
        """Return a logit bias for what ends strings, calls and answers: a random model would ramble."""
        marks = _marks(number, thinks=thinks)
        ids = [self._loaded.tokenizer.encode(mark, special=True, bos=False)[-1] for mark in marks]
        return tuple((self._ends | dict.fromkeys(ids, 6.0)).items())

    def of(self, number: int, *, thinks: bool) -> Answerer:
        key = number, thinks
        if key not in self._made:
            loaded, form = self._loaded, FORMS[number][1]
            tokenizer: Any = _Tokenizer(loaded.tokenizer, _marks(number, thinks=thinks))
            templates = Templates(tokenizer, number, thinks=thinks)
            source = templates.source.source
            assert find_support(source, tokenizer.special_strings, templates.text).form == form
            plain = LoadedModel(loaded.name, loaded.engine, tokenizer, loaded.prompt_tokens)
            self._made[key] = Answerer(plain, templates, self._grammars, Settings())
        return self._made[key]


def _marks(number: int, *, thinks: bool) -> list[str]:
    marks, form = FORMS[number]
    return control_strings(form if marks else None, THINK if thinks else None)


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A request, and the schemas that its answer has to obey."""

    number: int  # of the format
    thinks: bool
    kind: str  # the tool choice, or "json"
    request: AnswerRequest
    schemas: Mapping[str, dict[str, Any]]  # by tool; of the content: ""


def random_case(rng: random.Random, number: int, schema: dict[str, Any], answerers: Answerers) -> Case:
    """Return a request with a schema, of a tool's arguments where that is possible, in a format of calls."""
    thinks = FORMS[number][1].body != "harmony" and rng.random() < 0.4
    can_be_tool = schema.get("type") == "object"
    kind = rng.choice(["required", "required", "auto", "named", "json", "json or call"] if can_be_tool else ["json"])
    names = rng.sample(NAMES, rng.randint(1, 3))
    schemas: dict[str, dict[str, Any]] = {name: rng.choice(FILLERS) for name in names}
    if kind != "json":
        schemas[names[0]] = schema
    parameters: dict[str, Any] = {
        "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(3, 12)))}],
        "sampling": {
            "temperature": 1.0,
            "max_tokens": MAX_TOKENS,
            "seed": rng.randrange(2**32),
            "top_p": rng.choice([1.0, 0.95]),
            "logit_bias": answerers.bias(number, thinks=thinks),
        },
        "parallel_tool_calls": rng.choice([None, False, True]),
        "thinking_budget": rng.randint(0, 12) if thinks else None,
    }
    if kind == "json" and rng.random() < 0.7:
        schemas = {}
    if kind.startswith("json"):
        own = schema if kind == "json" else rng.choice(FILLERS[1:])
        schemas = {**schemas, "": own}
        parameters["grammar"] = GrammarSpec("json_schema", json.dumps(own), strict=rng.random() < 0.7)
    if kind in ("required", "named"):
        parameters["tool_choice"] = ToolChoice("required", frozenset(names[:1]) if kind == "named" else None)
    parameters["tools"] = [
        {"type": "function", "function": {"name": name, "description": name, "parameters": one}}
        for name, one in schemas.items()
        if name
    ]
    return Case(number, thinks, kind, AnswerRequest(**parameters), schemas)


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


FILLERS: list[dict[str, Any]] = [
    {},
    _closed(n={"type": "integer", "minimum": 0, "maximum": 99}),
    _closed(city={"type": "string", "maxLength": 4}, unit={"enum": ["c", "f"]}),
    _closed(ok={"type": "boolean"}, at={"type": "array", "items": {"type": "boolean"}, "maxItems": 2}),
]


# -- schemas -----------------------------------------------------------------------------------------------------------


def shared_schemas() -> list[dict[str, Any]]:
    """Return the schemas of the test data that Python can check, bounded."""
    found: list[Any] = []
    for name in ("iglu", "schemastore", "test_suite"):
        for line in _lines(f"{name}.jsonl"):
            found += [line["schema"]]
    for line in _lines("tools_bfcl.jsonl"):
        found += [tool["function"]["parameters"] for tool in line["tools"]]
    return [bounded(schema) for schema in found if isinstance(schema, dict) and _has_python_regexes(schema)]


def _lines(name: str) -> Iterator[dict[str, Any]]:
    for line in data_file(f"jsonschema/{name}").read_text().splitlines():
        yield json.loads(line)


def _has_python_regexes(schema: dict[str, Any]) -> bool:
    return "\\p{" not in json.dumps(schema)


def bounded(schema: Any) -> Any:
    """Return a schema whose strings and lists are short: a random model does not come to an end by itself."""
    if isinstance(schema, list):
        return [bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = ("const", "enum", "default", "examples", "required")
    limited = {key: value if key in kept else bounded(value) for key, value in schema.items()}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not schema.keys() & {"pattern", "format", "enum", "const"}:
        least = _number(schema.get("minLength"))
        limited["maxLength"] = (
            min(_number(schema.get("maxLength"), 6), max(least, 30)) if least <= 6 or "maxLength" in schema else least
        )
    if "array" in kinds and "maxItems" not in schema:
        limited["maxItems"] = max(2, _number(schema.get("minItems")))
    return limited


def _number(value: Any, default: int = 0) -> int:
    return value if isinstance(value, int) else default


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Return the schema of an object."""
    schema = _object(rng, 2)
    if rng.random() < 0.15:
        schema["$defs"] = {"leaf": _leaf(rng)}
        schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
    if rng.random() < 0.05:
        schema["properties"]["twin"] = {"$ref": "#/properties/" + next(iter(schema["properties"]))}
    return schema


KEYS = ("a", "b", "city", "n", "q_2", "with-dash", "flag", "items", "list of", "é")


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(KEYS[: 8 if rng.random() < 0.9 else 10], rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _value(rng, depth - 1) for key in keys},
        "required": rng.sample(keys, rng.randint(0, len(keys))),
    }
    extra = rng.random()
    if extra < 0.7:
        schema["additionalProperties"] = False
    elif extra < 0.85:
        schema["additionalProperties"] = _leaf(rng)
    odd = rng.random()
    if odd < 0.03:
        schema["minProperties"] = 1
    elif odd < 0.06:
        schema["patternProperties"] = {"^x_": _leaf(rng)}
    elif odd < 0.09:
        schema["anyOf"] = [{"required": [keys[0]]}, {"required": [keys[-1]]}]
    elif odd < 0.12:
        schema["allOf"] = [{"properties": {keys[0]: {"type": ["string", "integer", "boolean"]}}}]
    elif odd < 0.13:
        schema["dependentRequired"] = {keys[0]: [keys[-1]]}
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    roll = rng.random()
    if depth and roll < 0.12:
        return _object(rng, depth)
    if depth and roll < 0.27:
        least = rng.randint(0, 2)
        schema: dict[str, Any] = {
            "type": "array",
            "items": _value(rng, depth - 1),
            "maxItems": least + rng.randint(0, 2),
        }
        if rng.random() < 0.2:
            schema["prefixItems"] = [_leaf(rng)]
        return schema | ({"minItems": least} if least else {})
    if roll < 0.35:
        union = rng.choice(["anyOf", "anyOf", "oneOf"])
        return {union: [{"type": "string", "maxLength": 3}, {"type": rng.choice(["integer", "null", "boolean"])}]}
    if roll < 0.38:
        return {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 4}]}
    return _leaf(rng)


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 8)},
            {"type": "string", "minLength": (least := rng.randint(0, 3)), "maxLength": least + 2},
            {"type": "string", "pattern": rng.choice(["^[a-f]{2,6}$", "^[A-Z][0-9]$", "^(ab|cd)?$", "[xy]{1,2}"])},
            {"type": "string", "enum": rng.sample(["on", "off", "n/a", "a b", "<x>", 'q"', "é"], 2)},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time", "made-up"]), "maxLength": 40},
            {"type": "string", "const": "fixed"},
            {"enum": rng.sample(["yes", 1, True, None, 2.5], 3)},
            {"const": rng.choice([1, "one", False])},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "maximum": 10**6},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([1, 2, 5, 7])},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + 3},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"], "maxLength": 4},
            {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
        ]
    )


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Counts of outcomes: refused, cut, relaxed, valid; and the reasons of refusals."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by format and outcome
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind of request and outcome
    reasons: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    tokens: int = 0
    forced: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, case: Case, outcome: str) -> None:
        self.outcomes[FORMS[case.number][1].name if case.number < len(KNOWN) else "generic", outcome] += 1
        self.kinds[case.kind, outcome] += 1

    def count(self, outcome: str) -> int:
        return sum(number for (_, name), number in self.outcomes.items() if name == outcome)

    def lines(self) -> Iterator[str]:
        """Yield the counts as a table."""
        columns = ("valid", "relaxed", "cut", "refused")
        yield (
            f"{self.calls} calls, {self.tokens} tokens, {self.forced} of them forced; {self.drafted} drafted, "
            f"{self.accepted} accepted"
        )
        yield "".join([f"{'':32}", *(f"{name:>9}" for name in columns)])
        yield "".join([f"{'all':32}", *(f"{self.count(name):9}" for name in columns)])
        for counts in (self.kinds, self.outcomes):
            for row in dict.fromkeys(key for key, _ in counts):
                yield "".join([f"{row:32}", *(f"{counts[row, name]:9}" for name in columns)])
        for reason, number in sorted(self.reasons.items(), key=lambda item: -item[1]):
            yield f"{number:5} {reason}"


@dataclass(frozen=True)
class Result:
    """An answer as a client sees it."""

    answer: Answer
    reason: str
    notes: tuple[str, ...]


async def ask(answerers: Answerers, case: Case, report: Report | None = None) -> Result | RequestError:
    """Return the answer to a request, or why it is refused."""
    answerer = answerers.of(case.number, thinks=case.thinks)
    try:
        prepared = await answerer.prepare(case.request)
    except RequestError as error:
        return error
    parts: list[Part] = []
    reason, notes = "", tuple[str, ...]()
    try:
        async for delta in answerer.answer(prepared):
            parts += delta.parts
            reason, notes = delta.reason or reason, delta.notes or notes
            if delta.stats and report is not None:
                report.tokens += delta.stats.completion_tokens
                report.forced += delta.stats.forced
                report.drafted += delta.stats.drafted
                report.accepted += delta.stats.accepted
    except RequestError as error:
        reason = f"error: {error}"
    return Result(collected(parts), reason, notes)


def judged(case: Case, result: Result | RequestError, report: Report) -> None:
    """Count an answer. Raises AssertionError for one that is finished and does not obey the request."""
    if isinstance(result, RequestError):
        report.add(case, "refused")
        report.reasons[_reason(result.message)] += 1
        return
    answer, choice = result.answer, case.request.tool_choice
    if result.reason == "length":
        report.add(case, "cut")
        return
    assert result.reason == ("tool_calls" if answer.calls else "stop"), result
    relaxed = {match[1] for note in result.notes if (match := re.match(r"the schema of (\S+) is", note))}
    if any(note.startswith("not enforced") for note in result.notes):
        relaxed.add("")
    for note in result.notes:
        report.reasons["relaxed: " + _reason(note)] += 1
    for name, arguments, is_complete in answer.calls:
        assert is_complete, result
        assert name in case.schemas if choice.names is None else name in choice.names, result
        value = json.loads(arguments)
        assert isinstance(value, dict), result
        if name not in relaxed:
            check_valid(arguments, case.schemas[name] or {"maxProperties": 0})
    if choice.mode == "required":
        assert answer.calls, result
        assert not answer.content.strip(), result
    if not case.request.has_several_calls:
        assert len(answer.calls) <= 1, result
    same = [(name, arguments) for name, arguments, _ in answer.calls]
    assert len(set(same)) == len(same), result
    if "" in case.schemas and (answer.content.strip() or not answer.calls):
        json.loads(answer.content)
        if "" not in relaxed:
            check_valid(answer.content, case.schemas[""])
    report.calls += len(answer.calls)
    report.add(case, "relaxed" if relaxed else "valid")


def _reason(message: str) -> str:
    """Return a message without the names of the request."""
    return re.sub(r"the schema of \S+ is|the strict tool \S+", "a schema is", message)[:90]


def check_valid(text: str, schema: dict[str, Any]) -> None:
    """Raise AssertionError unless a text is the JSON of a schema. Decimals: a float has no exact multiples."""
    with decimal.localcontext() as context:
        context.prec = 2000
        exact = json.loads(json.dumps(schema), parse_float=_exact)
        validator = jsonschema.validators.validator_for(exact, jsonschema.Draft202012Validator)(exact)
        value = json.loads(text, parse_float=_exact)
        error = next(validator.iter_errors(value), None)
        assert error is None, f"{error.message}: {text} for {json.dumps(schema)}"


def _exact(text: str) -> Any:
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:  # the exponent has too many digits
        return float(text)
