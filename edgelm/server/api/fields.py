"""Fields that several APIs share: sampling, grammars, options of a stream; and the errors of fields.

Owns their types and translation. base/sampling.py has the names and ranges of sampling parameters.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StringConstraints,
    Tag,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticCustomError

from edgelm.base.durations import parse_keep_alive
from edgelm.base.sampling import MAX_SEED, SAMPLING, DraftChoice
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.server.api.errors import ApiError
from edgelm.server.api.json_body import JsonBody
from edgelm.server.api.sentinels import OFF, Sentinels, without_sentinels

MAX_ENTRIES = 4096  # of a list or an object in a body
MAX_CHARS = 2**20  # of all texts of a field that is not in LONG
LONG = frozenset(  # conversations, prompts, and what is embedded: the context limits them
    {"messages", "system", "prediction", "edgelm", "input", "instructions", "prompt", "suffix", "content", "tokens"}
    | {"input_prefix", "input_suffix", "input_extra", "query", "documents", "texts", "images"}
)
MAX_STOPS = 64
MAX_STOP_LEN = 1024
MAX_BIAS = 100
MAX_CHOICES = 16
_PLAIN = {  # pydantic's messages have the names of our classes and of Python's types
    "model_type": "input should be an object",
    "dict_type": "input should be an object",
}
_EMPTY = ("too_short", "string_too_short")  # every minimum length is 1
_TAGS = frozenset({"str", "list", "strs", "ids", "lists"})  # of unions: pydantic names them in the path
_OUT_OF_RANGE = ("greater_than", "less_than", "too_long", "too_short", "string_too", "keep_alive")

T = TypeVar("T", bound="Body")


def text_form(value: object) -> str:
    """Return which form of _TAGS a prompt or an input has: only that one is checked."""
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, list):
        return "str"
    return "strs" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


class Body(BaseModel):
    """A JSON object of a request. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)
    token_lists: ClassVar[tuple[str, ...]] = ("prompt", "tokens")  # fields that may have more than MAX_ENTRIES
    sentinels: ClassVar[Sentinels] = OFF
    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed in the body, for the answer to say."""
        return self._notes

    def noted(self, notes: tuple[str, ...]) -> Self:
        """Return the body with those notes."""
        self._notes = notes
        return self


def _form(value: object) -> str:
    """Return which branch of `str | list` a value is checked against, so that its error speaks of one of them."""
    return "list" if isinstance(value, list) else "str"


Text = Annotated[str, StringConstraints(min_length=1)]
TextOrParts = Annotated[Annotated[str, Tag("str")] | Annotated[list[dict[str, Any]], Tag("list")], Discriminator(_form)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LEN)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Stop = Annotated[Annotated[StopText, Tag("str")] | Annotated[Stops, Tag("list")], Discriminator(_form)]
StopTokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_STOPS)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


def _keep_alive(value: object) -> float | None:
    try:
        return None if value is None else parse_keep_alive(value)
    except ValueError as error:
        raise PydanticCustomError("keep_alive", "{values}", {"values": f"give {error}"}) from None


# Seconds, or infinity: the model stays loaded so long after the request. None: as the settings say.
KeepAlive = Annotated[Annotated[float, Field(allow_inf_nan=True)] | None, BeforeValidator(_keep_alive)]


def _logit_bias(value: object) -> object:
    """Return OpenAI's form of llama-server's: pairs of a token and its bias, where false excludes the token."""
    if not isinstance(value, list):
        return value
    pairs = [entry for entry in value if isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int]
    if len(pairs) < len(value):
        raise PydanticCustomError("logit_bias", "give an object of token ids, or a list of [token id, bias]")
    return {str(token): -float(MAX_BIAS) if bias is False else bias for token, bias in pairs}


LogitBias = Annotated[dict[str, float], BeforeValidator(_logit_bias)]


def validated(model: type[T], data: dict[str, Any]) -> T:
    """Return the checked fields of a body. Raises ApiError with the name of the first wrong one."""
    for name, value in data.items():
        if isinstance(value, list | dict) and len(value) > MAX_ENTRIES and name not in model.token_lists:
            message = f"{name} has {len(value):,} entries: at most {MAX_ENTRIES:,} are allowed"
            raise ApiError(400, "invalid_value", message, param=name)
    for name, size in (data.sizes if isinstance(data, JsonBody) else {}).items():
        if size > MAX_CHARS and name in model.model_fields and name not in LONG:
            message = f"{name} has {size:,} characters: at most {MAX_CHARS:,} are allowed"
            raise ApiError(400, "invalid_value", message, param=name)
    try:
        body = model.model_validate(without_sentinels(data, model.sentinels))
        return body.noted(data.notes) if isinstance(data, JsonBody) else body
    except ValidationError as error:
        raise _as_api_error(error) from None


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(step) for step in first["loc"] if step not in _TAGS)
    if first["type"] == "missing":
        return ApiError(400, "missing_required_parameter", f"{param} is missing", param=param)
    if first["type"] in _EMPTY:
        return ApiError(400, "invalid_value", f"{param} is empty", param=param)
    code = "invalid_value" if first["type"].startswith(_OUT_OF_RANGE) else "invalid_type"
    message = _PLAIN.get(first["type"]) or first["msg"][:1].lower() + first["msg"][1:]
    return ApiError(400, code, f"{param}: {message}", param=param)


class KeepAliveFields(Body):
    """How long the model stays loaded after a request: Ollama's field, for every API."""

    keep_alive: KeepAlive = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


def _with_fields() -> type[Body]:
    """Return a body with the fields of sampling parameters, by all their names."""
    definitions: dict[str, Any] = {
        name: (param.kind | None, Field(default=None, ge=param.ge, gt=param.gt, le=param.le, lt=param.lt))
        for own_name, param in SAMPLING.items()
        for name in (own_name, *param.other_names)
    }
    return create_model("SamplingValues", __base__=Body, __module__=__name__, **definitions)


if TYPE_CHECKING:  # whose fields mypy cannot know
    _Values: TypeAlias = Body
else:
    _Values = _with_fields()


def sampling_values(body: Body) -> dict[str, Any]:
    """Return the sampling parameters that a body gives, by our names."""
    values: dict[str, Any] = {}
    for own_name, param in SAMPLING.items():
        for name in (own_name, *param.other_names):
            if own_name not in values and (value := getattr(body, name, None)) is not None:
                values[own_name] = value
    return values


class SamplingFields(_Values):
    """How tokens are chosen. None: the server's setting."""

    logit_bias: LogitBias | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stop | None = None
    stop_token_ids: StopTokens | None = None  # vLLM's field
    draft: DraftChoice | None = None
    speculation: bool | None = None  # the older field; False: no drafts
    repeatable: bool | None = None  # True: the same answer every time, to the letter

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> dict[str, Any]:
        """Return fields of SamplingParams. Raises ApiError."""
        values = sampling_values(self)
        if draft := "off" if self.speculation is False else self.draft:
            values["draft"] = draft
        if self.repeatable:
            values["repeatable"] = True
        if self.seed is not None:
            values["seed"] = self.seed & MAX_SEED  # OpenAI's seeds may be negative
        if self.stop_token_ids:
            values["stop_ids"] = frozenset(self.stop_token_ids)
        if self.logit_bias:
            values["logit_bias"] = tuple(_token_bias(*entry) for entry in self.logit_bias.items())
        return values


def _token_bias(token: str, bias: float) -> tuple[int, float]:
    if not (token.isascii() and token.isdecimal() and len(token) < 10):
        raise ApiError(400, "invalid_value", f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
    if not -MAX_BIAS <= bias <= MAX_BIAS:
        message = f"logit_bias: {bias} is not within -{MAX_BIAS} to {MAX_BIAS}"
        raise ApiError(400, "invalid_value", message, param="logit_bias")
    return int(token), bias


class StructuredOutputs(Body):
    """VLLM's field for grammars."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GrammarFields(Body):
    """The form that the answer must have: OpenAI's field, and those of vLLM and llama-server."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None  # GBNF
    json_schema: dict[str, Any] | None = None

    def grammar_spec(self, name: str = "", own: GrammarSpec | None = None) -> GrammarSpec | None:
        """Return the grammar of the content, which may be that of an API's own field.

        Raises ApiError for two at once, and for a malformed one.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        specs = {
            "response_format": _response_format(self.response_format),
            "structured_outputs.json": _schema(outputs.json_, "structured_outputs.json"),
            "structured_outputs.regex": _regex(outputs.regex),
            "structured_outputs.choice": _choice(outputs.choice, "structured_outputs.choice"),
            "structured_outputs.grammar": _grammar(outputs.grammar),
            "structured_outputs.json_object": GrammarSpec("json_object") if outputs.json_object else None,
            "guided_json": _schema(self.guided_json, "guided_json"),
            "guided_regex": _regex(self.guided_regex),
            "guided_choice": _choice(self.guided_choice, "guided_choice"),
            "guided_grammar": _grammar(self.guided_grammar),
            "grammar": _grammar(self.grammar or None),
            "json_schema": _schema(self.json_schema, "json_schema"),
            name: own,
        }
        given = [(name, spec) for name, spec in specs.items() if spec is not None]
        if len(given) > 1:
            first, second = given[0][0], given[1][0]
            raise ApiError(400, "invalid_value", f"{first} and {second} are both given: omit one", param=second)
        return given[0][1] if given else None


def _response_format(value: dict[str, Any] | None) -> GrammarSpec | None:
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(schema)}:  # llama-server's form
            return schema_spec(schema)
        case {"type": "json_object"}:
            return GrammarSpec("json_object")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as form}:
            return schema_spec(schema, strict=form.get("strict") is not False)
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema_spec(schema, strict=value.get("strict") is not False)
        case {"type": "json_schema"}:
            message, param = "response_format.json_schema.schema is missing", "response_format.json_schema.schema"
            raise ApiError(400, "missing_required_parameter", message, param=param)
    message = "response_format.type is not text, json_object or json_schema"
    raise ApiError(400, "invalid_value", message, param="response_format.type")


def _schema(value: dict[str, Any] | str | None, param: str) -> GrammarSpec | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(400, "invalid_value", f"{param} is not JSON", param=param) from None
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, "invalid_value", f"{param} is not a JSON schema", param=param)
    return None if value is None else schema_spec(value)


def schema_spec(schema: dict[str, Any], *, strict: bool = True) -> GrammarSpec:
    """Return the grammar of a JSON schema; one that is not strict may be enforced in part."""
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False), strict)


def _regex(source: str | None) -> GrammarSpec | None:
    return None if source is None else GrammarSpec("regex", source)


def _choice(choices: list[str] | None, param: str) -> GrammarSpec | None:
    if choices is not None and not choices:
        raise ApiError(400, "invalid_value", f"{param} has no choice", param=param)
    return None if choices is None else GrammarSpec("choice", json.dumps(choices))


def _grammar(source: str | None) -> GrammarSpec | None:
    """Return a grammar in GBNF, or in llguidance's Lark, which writes `start:` in place of `root ::=`."""
    if source is None:
        return None
    return GrammarSpec("gbnf" if "::=" in source else "lark", source)
