"""LlamaIndex: its classes for Ollama, and those for servers that are like OpenAI's."""

from __future__ import annotations

from typing import Any

from checks import ADDRESS, MODEL, PATIENCE_S, check, main
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

given: dict[str, Any] = {
    "model": MODEL,
    "base_url": ADDRESS,
    "request_timeout": PATIENCE_S,
    "context_window": 8192,
    "temperature": 0,
    "additional_kwargs": {"num_predict": 300, "repeat_penalty": 1.1},
}
llm = Ollama(**given, keep_alive="5m")
USER = [ChatMessage(role="system", content="Be brief"), ChatMessage(role="user", content="what is the weather?")]
openai: dict[str, Any] = {
    "model": MODEL,
    "api_base": f"{ADDRESS}/v1",
    "api_key": "any",
    "context_window": 8192,
    "temperature": 0,
}


class Weather(BaseModel):
    """A form of an answer."""

    city: str
    days: int


def weather(city: str, days: int) -> str:
    """Tell the weather."""
    return f"sunny in {city} for {days}"


tool = FunctionTool.from_defaults(weather)


@check
def ollama_chat() -> None:
    assert llm.chat(USER).message.content


@check
def ollama_stream() -> None:
    assert "".join(part.delta or "" for part in llm.stream_chat(USER))


@check
def ollama_complete() -> None:
    assert llm.complete("Hello").text
    assert "".join(part.delta or "" for part in llm.stream_complete("Hello"))


@check
def ollama_tools() -> None:
    answer = llm.chat_with_tools([tool], user_msg="what is the weather?")
    calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    assert [call.tool_name for call in calls] == ["weather"], answer.message.content
    assert {"city", "days"} <= set(calls[0].tool_kwargs)


@check
def ollama_structured() -> None:
    made = llm.as_structured_llm(Weather).complete("what is the weather?")
    assert isinstance(made.raw, Weather)


@check
def ollama_thinking() -> None:
    thinking = Ollama(**given, thinking=True)
    assert thinking.chat(USER).message.blocks


@check
def ollama_embeddings() -> None:
    vectors = OllamaEmbedding(model_name=MODEL, base_url=ADDRESS)
    assert len(vectors.get_text_embedding_batch(["hello", "world"])) == 2


@check
def openai_like_chat() -> None:
    like = OpenAILike(**openai, max_tokens=300, is_chat_model=True, is_function_calling_model=True)
    assert like.chat(USER).message.content
    answer = like.chat_with_tools([tool], user_msg="what is the weather?")
    calls = like.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    assert [call.tool_name for call in calls] == ["weather"], answer.message.content


@check
def openai_like_complete() -> None:
    assert OpenAILike(**openai, max_tokens=8).complete("the and of").text


@check
def openai_like_embeddings() -> None:
    vectors = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{ADDRESS}/v1", api_key="any")
    assert len(vectors.get_text_embedding_batch(["hello", "world"])) == 2


if __name__ == "__main__":
    main("llama-index-llms-ollama")
