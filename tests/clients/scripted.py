"""Writes a model whose tokens are given: it reasons, calls two tools, answers, and does not stop talking if told to.

An agent's own tools are called, so there is a script for each agent. A part of a script is one token of the vocabulary,
and the table of the model (model.py) leads from part to part. The template chooses the script's turn: by the number of
tool results after the last message of the user. Requests without tools, such as for titles, get a fixed answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import TokenType

from tests.clients.model import TEMPLATE_HEAD, vocabulary, write_table

CONTEXT = 131_072
TALK = "TALK"  # in a message of the user: the answer does not end
THOUGHT = " I look at the file first, then I run a command."
ANSWER = "The file says hello, and the command printed 42."
ASIDE = "Two small steps"
ENDLESS = " and so on"
TURNS = 3
TEMPLATE = (
    TEMPLATE_HEAD
    + """{%- set count = namespace(results=0, talk=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set count.results = 0 %}{%- set count.talk = 'TALK' in (message.content or '') %}
    {%- elif message.role == 'tool' %}{%- set count.results = count.results + 1 %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if count.talk %}{{- '<|talk|>' }}
    {%- elif not tools %}{{- '<|aside|>' }}
    {%- else %}{{- '<|turn' ~ [count.results, 2] | min ~ '|>' }}
    {%- endif %}
{%- endif %}"""
)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool and its arguments."""

    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        arguments = json.dumps(self.arguments)
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {arguments}}}\n</tool_call>'


def write_scripted(path: Path, first: Call, second: Call, aside: str = ASIDE) -> Path:
    """Write the model of one script, and return its path."""
    texts, kinds = vocabulary()
    markers = [*(f"<|turn{number}|>" for number in range(TURNS)), "<|aside|>", "<|talk|>"]
    parts = list(dict.fromkeys([THOUGHT, first.text, second.text, ANSWER, aside, "On", ENDLESS]))
    texts += [*markers, *parts]
    kinds += [TokenType.CONTROL] * len(markers) + [TokenType.USER_DEFINED] * len(parts)
    logits = np.full((len(texts), len(texts)), -12.0, np.float32)
    chains = [
        ["<|turn0|>", "<think>", THOUGHT, "</think>", first.text, "<|im_end|>"],
        ["<|turn1|>", second.text, "<|im_end|>"],
        ["<|turn2|>", ANSWER, "<|im_end|>"],
        ["<|aside|>", aside, "<|im_end|>"],
        ["<|talk|>", "On", ENDLESS, ENDLESS],
    ]
    ids = {text: number for number, text in enumerate(texts)}
    for chain in chains:
        for last, following in pairwise(chain):
            logits[ids[last], ids[following]] = 30.0
    return write_table(path, texts, kinds, logits, TEMPLATE, CONTEXT)
