"""Fields that any of our APIs knows: each works in all of them, is refused, or is named in a note of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.dialects import DIALECTS, parse_answers
from edgelm.server.api.errors import ApiError
from edgelm.server.api.field_table import OLLAMA_OPTIONS
from edgelm.server.api.ollama import Options
from tests.server.api.test_sentinels import BODIES

SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    "presence_penalty": 0.5, "seed": 7, "draft": "ngram", "repeatable": True,
}  # fmt: skip
OTHER_NAMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "repeat_penalty": (1.5, {"repetition_penalty": 1.5}),
    "speculation": (False, {"draft": "off"}),
    "logit_bias": ({"3": -1}, {"logit_bias": ((3, -1.0),)}),
}
FORMS: dict[str, Any] = {
    "guided_regex": "[ab]", "guided_choice": ["a"], "guided_json": {"type": "object"}, "json_schema": {},
    "grammar": 'root ::= "a"', "guided_grammar": 'start: "a"', "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "[ab]"},
}  # fmt: skip


def parsed(path: str, **fields: Any) -> tuple[AnswerRequest, tuple[str, ...]]:
    more = {"max_tokens": 9} if path == "/v1/messages" else {}
    request, (answer,) = parse_answers(path, BODIES[path] | more | fields)
    return answer, request.notes


@pytest.mark.parametrize("path", BODIES)
def test_sampling_works_in_every_api(path: str) -> None:
    given = {name: (value, {name: value}) for name, value in SAMPLING.items()} | OTHER_NAMES
    for name, (value, expected) in given.items():
        answer, notes = parsed(path, **{name: value})
        assert expected.items() <= answer.sampling.items(), name
        assert notes == ()
    assert parsed(path, stop=["x"])[0].stop == ("x",)
    pairs, _ = parsed(path, logit_bias=[[3, -1], [5, False]])  # llama-server's form
    assert pairs.sampling["logit_bias"] == ((3, -1.0), (5, -100.0))
    assert "logit_bias" not in parsed(path, logit_bias=[])[0].sampling, "SillyTavern always sends it"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_an_answer_works_in_every_api(path: str, name: str) -> None:
    answer, notes = parsed(path, **{name: FORMS[name]})
    assert answer.grammar is not None
    assert notes == ()


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        ("/api/chat", {"format": "json"}),
    ],
)
def test_two_forms_are_refused(path: str, own: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="are both given"):
        parsed(path, **own, guided_regex="a")


def test_ollamas_options_come_before_the_same_fields_beside_them() -> None:
    answer, _ = parsed("/api/chat", temperature=0.1, seed=1, stop="x", options={"temperature": 0.9, "stop": ["y"]})
    assert answer.sampling == {"temperature": 0.9, "seed": 1}
    assert answer.stop == ("y",)


@pytest.mark.parametrize("path", BODIES)
def test_no_field_of_another_api_is_ignored_in_silence(path: str) -> None:
    """A field with a value is implemented here, has a row in the table, or is noted."""
    dialect = DIALECTS[path]
    known = {
        name for other in DIALECTS.values() for name in other.model.model_fields.keys() | other.table.refused.keys()
    }
    known |= Options.model_fields.keys() | OLLAMA_OPTIONS.refused.keys()
    here = dialect.model.model_fields.keys() | dialect.table.ignored.keys() | dialect.table.refused.keys()
    assert known - here, "every API has a field of its own"
    for name in sorted(known - here):
        _, notes = parsed(path, **{name: "x"})
        assert notes == (f"ignored fields, not of {dialect.table.route}: {name}",)
        assert parsed(path, **{name: None})[1] == ()
    for name, refused in dialect.table.refused.items():
        with pytest.raises(ApiError, match=f"{name} is not supported"):
            parsed(path, **{name: "x"})
        for harmless in refused.harmless:
            assert parsed(path, **{name: harmless})[1] == ()


def test_options_of_ollama_are_checked_as_the_fields_beside_them() -> None:
    _, notes = parsed("/api/chat", options={"temperature": 0, "think": True, "max_tokens": 3, "numa": True})
    assert notes == ("ignored fields, not of POST /api/chat: options.max_tokens, options.think",)
    with pytest.raises(ApiError, match="dry_multiplier is not supported"):
        parsed("/api/chat", options={"dry_multiplier": 0.5})
