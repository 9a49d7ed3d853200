"""Ids of calls that the model writes."""

from __future__ import annotations

import json

import pytest

from edgelm.text.calls.generic import GENERIC
from edgelm.text.parse import AnswerParser, CallBegin


@pytest.mark.parametrize(
    ("call_id", "is_kept"),
    [
        ("call_1.a:b-c", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("", False),
        ("a b", False),
        ("a/b", False),
        ("é", False),
        ("x\n", False),
        ("\ud83d", False),
    ],
)
def test_an_id_that_clients_cannot_send_back_is_replaced(call_id: str, is_kept: bool) -> None:
    written = json.dumps({"id": call_id, "name": "f", "arguments": {}})
    parser = AnswerParser(GENERIC, None, "", new_id=lambda: "new")
    parts = [*parser.push(None, f"<tool_call>{written}</tool_call>"), *parser.flush("stop")]
    (begin,) = [part for part in parts if isinstance(part, CallBegin)]
    assert begin.id == (call_id if is_kept else "new")
