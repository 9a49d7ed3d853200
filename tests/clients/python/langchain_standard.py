"""LangChain's standard tests: ChatOpenAI (chat completions, responses), ChatAnthropic, ChatOllama, and embeddings."""

from __future__ import annotations

from typing import Any

from checks import ADDRESS, ENCODER, MODEL, PATIENCE_S
from langchain_anthropic import ChatAnthropic
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

LIMIT = 300  # tokens of an answer
PENALTY = 1.1  # Ollama's default: without it, a small model may write one string over and over


class _Standard(ChatModelIntegrationTests):
    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    supports_anthropic_inputs = False
    supports_image_inputs = False
    supports_image_urls = False
    supports_pdf_inputs = False
    supports_audio_inputs = False
    model_override_value = MODEL


class TestChatCompletions(_Standard):
    """ChatOpenAI by /v1/chat/completions."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": f"{ADDRESS}/v1",
            "api_key": "any",
            "max_retries": 0,
            "timeout": PATIENCE_S,
            "stream_usage": True,
            "temperature": 0,
            "max_tokens": LIMIT,
            "extra_body": {"repetition_penalty": PENALTY},
        }


class TestResponses(TestChatCompletions):
    """ChatOpenAI by /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return super().chat_model_params | {"use_responses_api": True}


class TestMessages(_Standard):
    """ChatAnthropic by /v1/messages."""

    supports_json_mode = False
    supports_anthropic_inputs = True

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": ADDRESS,
            "api_key": "any",
            "max_retries": 0,
            "timeout": PATIENCE_S,
            "temperature": 0,
            "max_tokens": LIMIT,
        }


class TestOllama(_Standard):
    """ChatOllama by /api/chat, which has no choice of a tool."""

    has_tool_choice = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": ADDRESS,
            "client_kwargs": {"timeout": PATIENCE_S},
            "temperature": 0,
            "num_predict": LIMIT,
            "repeat_penalty": PENALTY,
        }


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    """OpenAIEmbeddings by /v1/embeddings."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "model": ENCODER,
            "base_url": f"{ADDRESS}/v1",
            "api_key": "any",
            "check_embedding_ctx_length": False,  # or else it sends token ids of OpenAI's models
        }


class TestOllamaEmbeddings(EmbeddingsIntegrationTests):
    """OllamaEmbeddings by /api/embed."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OllamaEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": ENCODER, "base_url": ADDRESS}
