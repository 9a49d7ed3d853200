"""Embeddings by openai-python and by LangChain's class over it, with the model that also chats."""

from __future__ import annotations

import math

import openai
from checks import ADDRESS, MODEL, PATIENCE_S, check, error_of, main
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

client = OpenAI(base_url=f"{ADDRESS}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S)


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@check
def base64_and_floats() -> None:
    texts = ["a cat", "a dog", "日本 🙂"]
    by_base64 = client.embeddings.create(model=MODEL, input=texts)  # what the client asks for by itself
    by_floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for one, other in zip(by_base64.data, by_floats.data, strict=True):
        assert abs(cosine(one.embedding, other.embedding) - 1) < 1e-5
    assert by_base64.usage.total_tokens > 0


@check
def dimensions() -> None:
    whole = client.embeddings.create(model=MODEL, input="a cat").data[0].embedding
    width = 1 + next(place for place, value in enumerate(whole) if value)  # the model's vectors begin with zeros
    vector = client.embeddings.create(model=MODEL, input="a cat", dimensions=width).data[0].embedding
    assert width < len(whole)
    assert len(vector) == width
    assert abs(math.hypot(*vector) - 1) < 1e-5


@check
def foreign_token_ids_are_refused() -> None:
    error = error_of(
        openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=[[9906, 1917, 3923, 2835, 100_257]])
    )
    assert "check_embedding_ctx_length=False" in str(error)


@check
def langchain() -> None:
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{ADDRESS}/v1", api_key="any", check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["a cat", "a dog"])
    assert abs(cosine(first, embeddings.embed_query("a cat")) - 1) < 1e-5
    assert cosine(first, second) < 1


if __name__ == "__main__":
    main("langchain-openai")
