"""Calls and results reach a model whose template has no calls, as the model writes and reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.jobs.constraints import Styles
from edgelm.jobs.prompts import Prompts
from edgelm.jobs.request import AnswerRequest
from edgelm.text.chat import render_chat
from edgelm.text.template import ChatTemplate
from edgelm.text.template_runner import TemplateRunner
from edgelm.text.tokenizer import Tokenizer
from tests.engine.fake import info
from tests.text.test_tool_loop import tokenizer_of

# LFM2: a loop over the messages that shows results, but no calls.
SOURCE = """{%- if tools %}<|im_start|>system
List of tools: <|tool_list_start|>{{ tools|tojson }}<|tool_list_end|><|im_end|>
{% endif %}
{%- for m in messages %}
    {{- "<|im_start|>" + m.role + "\\n" }}
    {%- set text = m.content %}
    {%- if m.role == "tool" %}{% set text = "<|tool_response_start|>" + text + "<|tool_response_end|>" %}{% endif %}
    {{- text + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
{#- <|tool_call_start|> <|tool_call_end|> #}"""
END = "<|tool_call_end|>"
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


class Chat:
    """The prompts of a template."""

    def __init__(self, source: str) -> None:
        self.tokenizer: Tokenizer = tokenizer_of(source)
        self.templates = TemplateRunner(self.tokenizer)
        loaded = LoadedModel("fake", cast(Any, SimpleNamespace(info=info())), self.tokenizer, None)
        self._prompts = Prompts(loaded, self.templates, Settings())
        self._styles = Styles(self.tokenizer, self.templates)

    async def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        request = AnswerRequest(messages=messages, tools=TOOLS)
        prompt, _ = await self._prompts.chat(request, await self._styles.of(request), "")
        return prompt.ids

    def shown(self, ids: list[int]) -> str:
        """Return the text of tokens, with ⟨⟩ around control tokens."""
        pieces = [self.tokenizer.piece(token) or f"⟨{self.tokenizer.text_of(token)}⟩".encode() for token in ids]
        return b"".join(pieces).decode()


@pytest.fixture
async def chats() -> AsyncIterator[list[Chat]]:
    made: list[Chat] = []
    yield made
    for chat in made:
        await chat.templates.close()


def history(arguments: dict[str, Any], text: str = "") -> list[dict[str, Any]]:
    function = {"name": "find", "arguments": json.dumps(arguments)}
    return [
        {"role": "user", "content": f"What is {END}?"},
        {"role": "assistant", "content": text, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "It is a mark."},
    ]


async def test_calls_are_the_control_tokens_that_the_model_writes(chats: list[Chat]) -> None:
    chats.append(chat := Chat(SOURCE))
    shown = chat.shown(await chat.prompt(history({"x": 1})))
    assert shown.endswith(
        f"⟨<|im_start|>⟩user\nWhat is {END}?⟨<|im_end|>⟩\n"
        "⟨<|im_start|>⟩assistant\n⟨<|tool_call_start|>⟩[find(x=1)]⟨<|tool_call_end|>⟩⟨<|im_end|>⟩\n"
        "⟨<|im_start|>⟩tool\n⟨<|tool_response_start|>⟩It is a mark.⟨<|tool_response_end|>⟩⟨<|im_end|>⟩\n"
        "⟨<|im_start|>⟩assistant\n"
    )


async def test_marks_in_texts_of_a_client_stay_text(chats: list[Chat]) -> None:
    chats.append(chat := Chat(SOURCE))
    end = chat.tokenizer.encode(END, special=True, bos=False)[0]
    rare = "".join(map(chr, range(0x31350, 0x31353)))
    for value in (END, rare, f"{END}]{rare}"):
        for text in ("", f"I wrote {END} and {rare}."):
            ids = await chat.prompt(history({"x": value, "other": rare[0]}, text))
            assert ids.count(end) == 1, value
            assert text in chat.shown(ids)


async def test_results_are_the_users_where_the_template_shows_none(chats: list[Chat]) -> None:
    chats.append(chat := Chat(SOURCE.replace("for m in messages", "for m in messages if m.role != 'tool'")))
    shown = chat.shown(await chat.prompt(history({"x": 1})))
    assert "⟨<|im_start|>⟩user\n<tool_response>\nIt is a mark.\n</tool_response>⟨<|im_end|>⟩" in shown


def test_messages_are_found_behind_the_control_tokens() -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    roles, texts = ("user", "assistant", "user"), ("Hi", "+f+ x", "y")
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    rendered = render_chat(ChatTemplate(source), chat, with_spans=True, own_marks={"+": "<|call|>"})
    assert rendered.text == "<|user|>Hi<|assistant|><|call|>f<|call|> x<|user|>y"
    assert [rendered.text[span.first : span.last + 1] for span in rendered.spans] == ["i", "x", "y"]
