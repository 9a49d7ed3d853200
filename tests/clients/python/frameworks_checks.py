"""Frameworks that force tools: each gets exactly one call, with the arguments that its function has.

`make clients` runs them with SmolLM2; EDGELM_ADDRESS and EDGELM_MODEL name any other.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["OPENAI_API_KEY"] = "any"
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or else it tries for ten seconds to fetch one

import agents
import litellm
from checks import ADDRESS, MODEL, PATIENCE_S, check, main
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

QUESTION = "What is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
# Of LiteLLM; those of Ollama send no tool_choice.
PROVIDERS = ("openai", "hosted_vllm", "lm_studio", "llamafile", "litellm_proxy", "anthropic", "ollama_chat", "ollama")


class Weather(BaseModel):
    """A form of an answer."""

    city: str
    degrees: int


def check_provider(provider: str) -> None:
    """Register a check: a forced tool is called once by a provider of LiteLLM, also in a stream."""

    def called() -> None:
        base = ADDRESS if provider in ("anthropic", "ollama", "ollama_chat") else f"{ADDRESS}/v1"
        forced: dict[str, Any] = {} if provider.startswith("ollama") else {"tool_choice": "required"}
        asked: dict[str, Any] = {
            "model": f"{provider}/{MODEL}", "messages": [{"role": "user", "content": QUESTION}], "api_base": base,
            "api_key": "any", "tools": [FUNCTION], "max_tokens": 300, "timeout": PATIENCE_S, "temperature": 0,
        } | forced  # fmt: skip
        answer = litellm.completion(**asked)
        streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
        for choice in (answer.choices[0], streamed.choices[0]):
            calls = choice.message.tool_calls or []
            assert len(calls) == 1 or not forced, (provider, choice)
            assert not calls or choice.finish_reason == "tool_calls", choice
            assert all(json.loads(call.function.arguments).keys() == {"city"} for call in calls if forced), calls
        assert answer.usage.completion_tokens > 0

    called.__name__ = f"litellm_{provider}"
    check(called)


for name in PROVIDERS:
    check_provider(name)


@check
def smolagents_calls_once_a_step() -> None:
    @tool
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: The name of the city.
        """
        return f"It is sunny in {city}."

    model = OpenAIServerModel(model_id=MODEL, api_base=f"{ADDRESS}/v1", api_key="any", max_tokens=300)
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
    agent.run(QUESTION)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None) is not None]
    assert steps, "no step has a call"
    assert all(len(step.tool_calls) == 1 for step in steps), steps
    assert not any("input schema" in str(step.error) for step in steps), [step.error for step in steps]


@check
def pydantic_ai_by_both_apis() -> None:
    provider = OpenAIProvider(base_url=f"{ADDRESS}/v1", api_key="any")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL, provider=provider), output_type=Weather, model_settings={"max_tokens": 300})
        assert isinstance(agent.run_sync("It is 21 degrees in Paris.").output, Weather), kind


def _weather_into(calls: list[str]) -> Any:
    def weather(city: str) -> str:
        """Tell the weather."""
        calls.append(city)
        return "sunny"

    return weather


@check
def openai_agents_by_both_apis() -> None:
    agents.set_tracing_disabled(True)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        calls: list[str] = []

        weather = agents.function_tool(_weather_into(calls), name_override="weather")
        client = AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="any", timeout=PATIENCE_S)
        settings = agents.ModelSettings(tool_choice="required", max_tokens=300)
        agent = agents.Agent(
            name="a", tools=[weather], model=kind(model=MODEL, openai_client=client),
            model_settings=settings, tool_use_behavior="stop_on_first_tool",
        )  # fmt: skip
        agents.Runner.run_sync(agent, QUESTION)
        assert len(calls) == 1, (kind, calls)


@check
def haystack_calls_once() -> None:
    weather = Tool(name="weather", description="Tells it.", parameters=PARAMETERS, function=lambda city: "sunny")
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("any"), model=MODEL, api_base_url=f"{ADDRESS}/v1", tools=[weather],
        generation_kwargs={"tool_choice": "required", "max_tokens": 300},
    )  # fmt: skip
    (reply,) = generator.run([ChatMessage.from_user(QUESTION)])["replies"]
    assert len(reply.tool_calls) == 1, reply.tool_calls
    assert reply.tool_calls[0].arguments.keys() == {"city"}


if __name__ == "__main__":
    main("litellm")
