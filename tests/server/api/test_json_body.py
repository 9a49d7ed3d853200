"""Which bodies are JSON objects, and that millions of values are refused before they become objects."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.server.api import json_body
from edgelm.server.api.errors import ApiError
from edgelm.server.api.json_body import MAX_HALVES, MAX_VALUES, REPLACED, read_json

TEXTS = st.text(st.sampled_from('a"\\,[{é\N{GRINNING FACE}\n'), max_size=8)
LEAF = st.none() | st.booleans() | st.integers() | TEXTS
INNER = LEAF | st.lists(LEAF, max_size=4) | st.dictionaries(TEXTS, LEAF, max_size=4)
JSON = INNER | st.lists(INNER, max_size=4) | st.dictionaries(TEXTS, INNER, max_size=4)


def status(body: bytes) -> int:
    with pytest.raises(ApiError) as caught:
        read_json(body)
    return caught.value.status


def num_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


@given(st.dictionaries(TEXTS, JSON, max_size=4), st.booleans(), st.integers(1, 12))
def test_any_object(value: dict[str, Any], ascii_only: bool, limit: int) -> None:
    """Marks and quotes inside of text are no structure, however they are escaped."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert read_json(body) == value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "MAX_VALUES", limit)
        if num_values(value) <= limit // 2:
            assert read_json(body) == value
        elif num_values(value) > limit + 1:
            assert status(body) == 413


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b",".join([b"1"] * 2_000_000) + b"]}",
        b'{"a":[' + b",".join([b"[]"] * 1_000_000) + b"]}",
        b'{"a":' * 1_000_000,
        b"[" * 1_000_000,
        b'""' * 1_000_000,
        b'{"a":"' + b'\\\\","' * 1_000_000,
        b'{"a":[' + b",".join([rb'"\\\"'] * 1_000_000) + b"]}",
    ],
    ids=["numbers", "lists", "objects", "a nest", "texts", "backslashes", "no text ends"],
)
def test_millions_of_values_become_no_objects(body: bytes) -> None:
    tracemalloc.start()
    try:
        assert status(body) in (400, 413)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body)


@pytest.mark.parametrize(
    "number",
    [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1E+400", b"9" * 400 + b".5"],
    ids=["nan", "infinity", "-infinity", "1e999", "-1E+400", "many digits"],
)
def test_numbers_that_no_answer_could_repeat(number: bytes) -> None:
    assert status(b'{"tools":[{"maximum":' + number + b"}]}") == 400


def test_numbers_and_texts_that_look_large() -> None:
    value = {"a": "1e999 NaN", "b": 10**400, "c": 1e308, "d": 1e-320}
    assert read_json(json.dumps(value).encode()) == value


def test_a_long_text_is_one_value() -> None:
    text = 'a, [b], {"c"}\\ \n' * 200_000
    assert read_json(json.dumps({"a": text}).encode()) == {"a": text}
    many = {"a": [0] * (MAX_VALUES - 10)}
    assert read_json(json.dumps(many).encode()) == many
    assert read_json(b"\xef\xbb\xbf" + b'{"a": 1}') == {"a": 1}, "as editors of Windows save it"


def test_the_characters_of_each_field() -> None:
    body = {"a": "\N{GRINNING FACE}\n", "b": [{"cd": ["e", 1, None]}, 1.5, "f"], "g": {}, "h": True}
    assert read_json(json.dumps(body).encode()).sizes == {"a": 2, "b": 4, "g": 0, "h": 0}


def test_only_a_few_halves_of_characters_are_replaced() -> None:
    assert read_json(rb'{"a":"' + rb"\ud800" * 10 + rb"\ud800x" * (MAX_HALVES - 10) + b'"}')["a"].endswith("\ufffdx")
    assert status(rb'{"a":"' + rb"\ud800x" * (MAX_HALVES + 11) + b'"}') == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"[" * 1000, b'{"a": \xff}', '{"a": 1}'.encode("utf-16")])
def test_what_is_no_json_object(body: bytes) -> None:
    assert status(body) == 400


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"a\ud83d b", "a\ufffd b"),
        (r"a\ude00", "a\ufffd"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd\N{GRINNING FACE}\ufffd"),
        (r"\\ud83d \uD83D", r"\ud83d" + " \ufffd"),  # the first one is a backslash and letters
        (r"\\\ud83d\n", "\\\ufffd\n"),
        (r"\ud83d\\ude00", "\ufffd\\ude00"),
    ],
)
def test_half_a_character_is_replaced_and_noted(written: str, text: str) -> None:
    body = read_json(f'{{"{written}": ["{written}"]}}'.encode())
    assert body == {text: [text]}
    assert body.notes == (REPLACED,)


def test_whole_characters_are_not_noted() -> None:
    body = read_json(rb'{"a": "\ud83d\ude00 \\ud83d"}')
    assert body == {"a": "\N{GRINNING FACE} \\ud83d"}
    assert body.notes == ()
    assert status(rb'{"a": "\ud83d", }') == 400
