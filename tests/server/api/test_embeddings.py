"""The bodies of /v1/embeddings and of the rerank routes, and their forms of an answer."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from openai.types.embedding_create_params import EmbeddingCreateParams

from edgelm.jobs.embed_request import MAX_INPUTS, Embedded, EmbedRequest, Ranked, RankRequest
from edgelm.server.api.dialects import parse_pooled
from edgelm.server.api.embeddings import EmbeddingsRequest
from edgelm.server.api.errors import ApiError
from edgelm.server.api.field_table import EMBEDDINGS

ROUTE = "/v1/embeddings"
RERANKS = ("/v1/rerank", "/v2/rerank", "/rerank")
RANKED = Ranked([0.2, 0.9, 0.5], [-1.4, 2.2, 0.0], [5, 6, 7])


def parse(**fields: Any) -> EmbedRequest:
    request = parse_pooled(ROUTE, {"model": "m"} | fields).pooled_request()
    assert isinstance(request, EmbedRequest)
    return request


def refused(route: str = ROUTE, **fields: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse_pooled(route, {"model": "m"} | fields)
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body["error"]
    return error


def test_every_form_of_input_arrives() -> None:
    assert parse(input="a").inputs == ["a"]
    assert parse(input=["a", "b"]).inputs == ["a", "b"]
    assert parse(input=[1, 2]).inputs == [[1, 2]]
    assert parse(input=[[1], [2, 3]]).inputs == [[1], [2, 3]]
    assert len(parse(input=[7] * 10_000).inputs[0]) == 10_000


def test_every_field_of_openai_is_known() -> None:
    known = EmbeddingsRequest.model_fields.keys() | EMBEDDINGS.ignored.keys() | EMBEDDINGS.refused.keys()
    assert EmbeddingCreateParams.__annotations__.keys() <= known


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "input": "a"}, "messages"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields)["param"].split(".")[0] == param


def test_cutting_is_requested_in_three_ways() -> None:
    assert not parse(input="a").truncate
    assert parse(input="a", truncate=True).truncate
    assert (parse(input="a", truncate_prompt_tokens=-1).truncate, parse(input="a").max_tokens) == (True, None)
    cut = parse(input="a", truncate_prompt_tokens=9)
    assert (cut.truncate, cut.max_tokens) == (True, 9)


def test_base64_and_numbers_are_the_same_vectors() -> None:
    vectors = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    embedded = Embedded(vectors, [3, 1, 4])
    as_numbers = parse_pooled(ROUTE, {"model": "m", "input": "a"}).response(embedded, "m")
    as_text = parse_pooled(ROUTE, {"model": "m", "input": "a", "encoding_format": "base64"}).response(embedded, "m")
    assert as_numbers["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert [entry["index"] for entry in as_text["data"]] == [0, 1, 2]
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in as_text["data"]]
    assert np.array_equal(decoded, vectors)
    assert np.array_equal(np.array([entry["embedding"] for entry in as_numbers["data"]], np.float32), vectors)


@pytest.mark.parametrize("route", RERANKS)
def test_a_ranking_in_the_form_of_jina_and_cohere(route: str) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2, "return_documents": True}
    request = parse_pooled(route, body)
    assert request.pooled_request() == RankRequest(query="q", documents=["a", "b", "c"])
    answer = request.response(RANKED, "m")
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    assert answer["usage"]["total_tokens"] == 18
    plain = parse_pooled(route, {"model": "m", "query": "q", "documents": ["a", "b", "c"]}).response(RANKED, "m")
    assert [entry["index"] for entry in plain["results"]] == [1, 2, 0]
    assert "document" not in plain["results"][0]


def test_a_ranking_in_the_form_of_tei() -> None:
    body = {"model": "m", "query": "q", "texts": ["a", "b", "c"], "return_text": True, "raw_scores": True}
    answer = parse_pooled("/rerank", body).response(RANKED, "m")
    assert answer == [
        {"index": 1, "score": 2.2, "text": "b"},
        {"index": 2, "score": 0.0, "text": "c"},
        {"index": 0, "score": -1.4, "text": "a"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "texts": []}, "texts"),
        ({"query": "q", "documents": ["a"], "texts": ["b"]}, "documents"),
        ({"query": "q", "documents": [{"title": "a"}]}, "documents"),
        ({"query": "q", "documents": [1]}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_a_wrong_ranking_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    assert refused("/rerank", **fields)["param"].split(".")[0] == param
