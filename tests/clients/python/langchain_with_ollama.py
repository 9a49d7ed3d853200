"""langchain-ollama: ChatOllama, OllamaLLM and OllamaEmbeddings."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import ADDRESS, MODEL, check, main
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

given: dict[str, Any] = {"model": MODEL, "base_url": ADDRESS, "num_ctx": 8192, "keep_alive": "5m"}
model = ChatOllama(**given, validate_model_on_init=True)
USER = [SystemMessage("Be brief"), HumanMessage("what is the weather?")]


class Weather(BaseModel):
    """A form of an answer."""

    city: str
    days: int


@tool
def weather(city: str, days: int) -> str:
    """Tell the weather."""
    return f"sunny in {city} for {days}"


@check
def invoke() -> None:
    answer = model.invoke(USER)
    assert answer.content
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["done_reason"] == "stop"


@check
def stream() -> None:
    chunks = list(model.stream(USER))
    assert len(chunks) > 2
    assert "".join(str(chunk.content) for chunk in chunks)


@check
def async_invoke() -> None:
    assert asyncio.run(model.ainvoke(USER)).content


@check
def a_tool_round() -> None:
    bound = model.bind_tools([weather])
    answer = bound.invoke([USER[1]])
    assert isinstance(answer, AIMessage)
    assert [call["name"] for call in answer.tool_calls] == ["weather"]
    results = [ToolMessage("sunny", tool_call_id=str(call["id"])) for call in answer.tool_calls]
    assert bound.invoke([USER[1], answer, *results]).content


@check
def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Weather, method=method).invoke("what is the weather?")
        assert isinstance(answer, Weather), method


@check
def reasoning() -> None:
    answer = ChatOllama(**given, reasoning=True).invoke(USER)
    assert answer.additional_kwargs["reasoning_content"]
    assert "reasoning_content" not in ChatOllama(**given, reasoning=False).invoke(USER).additional_kwargs


@check
def text() -> None:
    llm = OllamaLLM(**given, num_predict=8)
    assert llm.invoke("Hello")
    assert "".join(llm.stream("Hello"))


@check
def embeddings() -> None:
    vectors = OllamaEmbeddings(model=MODEL, base_url=ADDRESS)
    assert len(vectors.embed_documents(["hello", "world"])) == 2
    assert vectors.embed_query("hello")


if __name__ == "__main__":
    main("langchain-ollama")
