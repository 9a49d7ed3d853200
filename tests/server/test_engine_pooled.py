"""The JSON of many vectors is made in pieces: other answers go on meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgelm.server.sse import json_pieces

VECTOR = [0.25, -1e-9, 3.0]


@pytest.mark.parametrize(
    "document",
    [
        {
            "data": [{"index": index, "embedding": VECTOR} for index in range(3)],
            "model": 'a "b" \u00e9',
            "usage": {"n": 1},
        },
        {"embeddings": [VECTOR, VECTOR], "total": 1},
        [{"index": 0, "score": 0.5, "text": "x"}, {"index": 1, "score": 0.25}],
        {"embedding": []},
        {},
    ],
)
def test_pieces_are_the_document_and_none_has_two_vectors(document: Any) -> None:
    pieces = list(json_pieces(document))
    assert json.loads(b"".join(pieces)) == document
    assert max(piece.count(b"-1e-09") for piece in pieces) <= 1
