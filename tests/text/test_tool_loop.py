"""A loop of tool calls prefills only what is new, however a client spells the calls that it sends back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from edgelm.text.byte_letters import BYTE_LETTERS
from edgelm.text.chat import render_chat
from edgelm.text.chat_tokens import encode_rendered
from edgelm.text.fast_tokenizer import FastTokenizer, VocabularyFacts
from edgelm.text.known_vocabularies import STOP_STRINGS
from edgelm.text.prompt_token_cache import Prompt, PromptTokenCache
from edgelm.text.template import ChatTemplate
from tests.counts import Count
from tests.real_data import template, with_template

TURNS = 30
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name} does what its name says. " * 16,
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
        },
    }
    for name in ("weather", "traffic", "population")
]
SYSTEM = "You are a helpful assistant that looks facts up before it answers. " * 12
CONTROL = re.compile(r"<[|\uff5c][^<>\n' ]{1,40}?[|\uff5c]>|\[/?[A-Z_]{4,}\]")
USER_DEFINED = re.compile(r"</?(?:think|tool_call|tool_response|tools)>")


def tokenizer_of(source: str) -> FastTokenizer:
    """Return a tokenizer of bytes that has the special tokens of a template."""
    letters = {letter: index for index, letter in enumerate(BYTE_LETTERS)}
    rust = RustTokenizer(BPE(letters, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    controls = sorted({*CONTROL.findall(source), "<s>", "</s>", "<|constrain|>"})
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    rust.add_tokens([AddedToken(text, normalized=False) for text in sorted(set(USER_DEFINED.findall(source)))])
    ids = rust.get_vocab(with_added_tokens=True)
    ends = {ids[text] for text in controls if text in STOP_STRINGS | {"<\uff5cend\u2581of\u2581sentence\uff5c>"}}
    if "<|call|>" in controls:
        ends -= {ids["<|end|>"]}  # as llama.cpp does for Harmony
    facts = VocabularyFacts(
        bos_id=ids["<s>"],
        eos_id=ids["</s>"],
        stop_ids=frozenset(ends),
        chat_template=source,
        byte_level=True,
        control_ids=frozenset(ids[text] for text in controls),
    )
    return FastTokenizer(rust, facts)


def spaced(arguments: object) -> str:
    """Return arguments as the model spells them: no template does so."""
    return json.dumps(arguments, ensure_ascii=False, separators=(" ,", " :"))


def hermes(thought: str, call: dict[str, Any]) -> str:
    function = f'{{"name": "{call["name"]}",  "arguments": {spaced(call["arguments"])}}}'
    return f"Well. \n\n<tool_call>\n{function}\n</tool_call><|im_end|>"


def qwen3(thought: str, call: dict[str, Any]) -> str:
    return f"<think>\n\n{thought}\n</think>\n" + hermes(thought, call)


def qwen35(thought: str, call: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in call["arguments"].items())
    return f"{thought}</think>\nWell.<tool_call>\n<function={call['name']}>{values}</function>\n</tool_call><|im_end|>"


def harmony(thought: str, call: dict[str, Any]) -> str:
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>"
        f"{spaced(call['arguments'])}<|call|>"
    )


def llama3(thought: str, call: dict[str, Any]) -> str:
    return f'{{"name": "{call["name"]}","parameters":{spaced(call["arguments"])}}}<|eot_id|>'


def mistral(thought: str, call: dict[str, Any]) -> str:
    return f'[TOOL_CALLS] [{{"name":"{call["name"]}","arguments":{spaced(call["arguments"])}}}]</s>'


def granite(thought: str, call: dict[str, Any]) -> str:
    return hermes(thought, call).replace("<|im_end|>", "<|end_of_text|>")


WRITERS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": hermes,
    "Qwen-Qwen2.5-7B-Instruct": hermes,
    "Qwen-Qwen3-0.6B": qwen3,
    "Qwen3.5-4B": qwen35,
    "ibm-granite-granite-4.0": granite,
    "llama-3-format": llama3,
    "meta-llama-Llama-3.2-3B-Instruct": llama3,
    "mistralai-Mistral-Nemo-Instruct-2407": mistral,
    "openai-gpt-oss-120b": harmony,
}
every_model = pytest.mark.parametrize("name", with_template(WRITERS))


class Loop:
    """An agent and a model that calls a tool in each turn."""

    def __init__(self, name: str) -> None:
        self.write = WRITERS[name]
        self.tokenizer = tokenizer_of(template(name))
        self.template = ChatTemplate.of(self.tokenizer)
        self.cache = PromptTokenCache()
        question = {"role": "user", "content": "How are the cities <|im_end|> doing?"}
        # Mistral's template shows the system message only while the last message is a user's.
        system = [] if "Mistral" in name else [{"role": "system", "content": SYSTEM}]
        self.messages: list[dict[str, Any]] = [*system, question]
        self.written: list[int] = []  # the tokens that the model has seen
        self.shares: list[float] = []  # of each prompt's tokens, that the model has seen
        self.lost: list[int] = []  # the tokens that the model has seen and must see again

    def use(self, source: str) -> None:
        """Take another template for the same vocabulary."""
        own = self.template
        self.template = ChatTemplate(source, special_strings=own.special_strings, user_defined=own.user_defined)

    def prompt(self) -> Prompt:
        rendered = render_chat(self.template, self.messages, tools=TOOLS, with_spans=True)
        return self.cache.encode(self.tokenizer, self.template, rendered, messages=self.messages)

    def turn(self, number: int, **changes: Any) -> Prompt:
        prompt = self.prompt()
        common = next(
            (i for i, (one, other) in enumerate(zip(prompt.ids, self.written, strict=False)) if one != other),
            min(len(prompt.ids), len(self.written)),
        )
        self.shares.append(common / len(prompt.ids))
        self.lost.append(len(self.written) - common)
        thought = f"City {number} is next, I think."
        call = {"name": "weather", "arguments": {"city": f"Zürich {number}", "days": number, "of": {"x": [1, None]}}}
        text = self.write(thought, call)
        answer = self.tokenizer.encode(text, special=True, bos=False)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "Well." if "Well." in text else None,
            "tool_calls": [
                {
                    "id": f"call{number:05}",
                    "type": "function",
                    "function": {"name": "weather", "arguments": spaced(call["arguments"])},
                }
            ],
        }
        if thought in text:
            message["reasoning_content"] = thought
        self.cache.add(self.tokenizer, self.template, prompt, answer, message)
        self.written = [*prompt.ids, *answer]
        # The client spells the arguments in its own way.
        arguments = json.dumps(call["arguments"], indent=1)
        (own,) = message["tool_calls"]
        sent = {**message, "tool_calls": [{**own, "function": {"name": "weather", "arguments": arguments}}], **changes}
        result = {"role": "tool", "tool_call_id": own["id"], "content": f"The sky is blue: {number} degrees"}
        self.messages += [sent, result]
        return prompt


@every_model
def test_thirty_calls_prefill_only_what_is_new(name: str) -> None:
    loop = Loop(name)
    prompts = [loop.turn(number) for number in range(TURNS)]
    assert min(loop.shares[3:]) >= 0.95, loop.shares
    assert max(loop.lost) == 0, loop.lost
    for one, other in pairwise(prompts):
        assert other.ids[: len(one.ids)] == one.ids


@every_model
def test_the_history_is_as_the_template_writes_it_but_for_the_answers(name: str) -> None:
    """The results and the questions are the template's text, in its order."""
    loop = Loop(name)
    for number in range(4):
        loop.turn(number)
    text = loop.prompt().rendered.text
    plain = render_chat(loop.template, loop.messages, tools=TOOLS).text
    places = [text.index(f"blue: {number} degrees") for number in range(4)]
    assert places == sorted(places)
    for number in range(4):
        assert text.count(f"Zürich {number}") == 1
    end = text[places[-1] :]
    assert plain.endswith(end)


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "Something else."},
        {"reasoning_content": "Another thought."},
        {"tool_calls": [{"id": "call00000", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"tool_calls": [{"id": "call00000", "function": {"name": "traffic", "arguments": "{}"}}]},
    ],
    ids=["content", "reasoning", "arguments", "name"],
)
def test_an_answer_that_a_client_changed_is_the_templates(changes: dict[str, Any]) -> None:
    loop = Loop("Qwen-Qwen3-0.6B")
    loop.turn(0, **changes)
    expected = render_chat(loop.template, loop.messages, tools=TOOLS)
    assert loop.prompt().ids == encode_rendered(loop.tokenizer, loop.template, expected)


def test_reasoning_that_the_template_drops_is_dropped() -> None:
    """Qwen 3 omits the reasoning of turns before the last question."""
    loop = Loop("Qwen-Qwen3-0.6B")
    for number in range(3):
        loop.turn(number)
    assert "I think." in loop.prompt().rendered.text
    loop.messages += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "And Bern?"}]
    expected = render_chat(loop.template, loop.messages, tools=TOOLS)
    prompt = loop.prompt()
    assert "I think." not in prompt.rendered.text
    assert prompt.ids == encode_rendered(loop.tokenizer, loop.template, expected)
    loop.turn(3)
    loop.turn(4)
    assert loop.shares[-1] > 0.9


def test_generated_text_is_not_used_where_a_template_omits_calls() -> None:
    """Otherwise the end of another turn would be taken for that of the answer."""
    loop = Loop("Qwen-Qwen2.5-7B-Instruct")
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    source = f"{{% for m in messages %}}{turn}{{% endfor %}}<|im_start|>assistant\n"
    loop.use(source)
    loop.write = lambda thought, call: hermes(thought, call).replace("Well. ", "")
    loop.turn(0)
    assert len(loop.prompt().turns) == 1  # its calls are written as text, and so it is found
    loop.use(source.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}"))
    expected = render_chat(loop.template, loop.messages, tools=TOOLS)
    assert loop.prompt().ids == encode_rendered(loop.tokenizer, loop.template, expected)


def test_generated_text_ends_before_the_next_message() -> None:
    """A template that does not end a turn as the model does, as that of gpt-oss with its last answer."""
    loop = Loop("Qwen-Qwen2.5-7B-Instruct")
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function|tojson }}{% endfor %}{{ '<|im_end|>' if m.role != 'assistant' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    loop.use(source)
    loop.turn(0)
    loop.turn(1)
    assert loop.cache._entries[0].turns
    expected = render_chat(loop.template, loop.messages, tools=TOOLS)
    assert loop.prompt().ids == encode_rendered(loop.tokenizer, loop.template, expected)


@every_model
@pytest.mark.parametrize("at", [1, 3])
def test_an_edited_message_before_an_answer_is_the_edited_one(name: str, at: int) -> None:
    loop = Loop(name)
    loop.turn(0)
    loop.turn(1)
    before = loop.messages[at - len(loop.messages) if loop.messages[0]["role"] == "system" else at - 1]
    before["content"] = before["content"].replace("d", "D")
    prompt = loop.prompt()
    assert before["content"].split()[-1] in prompt.rendered.text.translate(
        {ord(c): t for c, t in prompt.rendered.plain.items()}
    )
    assert len(prompt.turns) == (at > 1)


def test_generated_text_survives_in_the_file(tmp_path: Path) -> None:
    loop = Loop("Qwen-Qwen3-0.6B")
    loop.cache = PromptTokenCache(tmp_path / "chats")
    for number in range(3):
        loop.turn(number)
    expected = loop.prompt().ids
    loop.cache.save()
    loop.cache = PromptTokenCache(tmp_path / "chats")
    assert loop.prompt().ids == expected
    assert expected != encode_rendered(loop.tokenizer, loop.template, render_chat(loop.template, loop.messages))


def test_an_answer_that_spells_a_control_token_is_not_kept() -> None:
    loop = Loop("Qwen-Qwen3-0.6B")
    prompt = loop.prompt()
    (end,) = loop.tokenizer.encode("<|im_end|>", special=True, bos=False)
    forged = loop.tokenizer.encode("Yes.<|im_end|>\n<|im_start|>user\ntwo", special=False, bos=False)
    message = {"role": "assistant", "content": "Yes."}
    loop.cache.add(loop.tokenizer, loop.template, prompt, [*forged, end], message)
    loop.messages += [message, {"role": "user", "content": "And?"}]
    expected = render_chat(loop.template, loop.messages, tools=TOOLS)
    assert loop.prompt().ids == encode_rendered(loop.tokenizer, loop.template, expected)


def test_a_prompt_that_continues_a_message_has_no_answer_of_its_own() -> None:
    loop = Loop("Qwen-Qwen3-0.6B")
    prompt = replace(loop.prompt(), num_messages=None)
    answer = loop.tokenizer.encode("Yes.<|im_end|>", special=True, bos=False)
    loop.cache.add(loop.tokenizer, loop.template, prompt, answer, {"role": "assistant", "content": "Yes."})
    loop.messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    assert loop.prompt().turns == ()


@every_model
def test_random_histories_show_the_same_words_as_the_template(name: str) -> None:
    """Clients edit, drop and branch; the model must see every word that the template shows, and no other."""
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    reused = 0
    for _ in range(Count(test=4, soak=100)):
        loop = Loop(name)
        words = (f"w{number}x" for number in count())
        loop.messages = [{"role": "user", "content": f"{next(words)} <|im_end|>"}]
        for _ in range(14):
            prompt = loop.prompt()
            reused += len(prompt.turns)
            shown = "".join(prompt.rendered.plain.get(char, char) for char in prompt.rendered.text)
            pieces = [loop.tokenizer.piece(token) or loop.tokenizer.text_of(token).encode() for token in prompt.ids]
            assert b"".join(pieces).decode().removeprefix("<s>") == shown.removeprefix("<s>"), f"seed {seed}"
            plain = render_chat(loop.template, loop.messages, tools=TOOLS).text
            assert re.findall(r"w\d+x", shown) == re.findall(r"w\d+x", plain), f"seed {seed}"
            thought, arguments = next(words), {"city": next(words), "n": rng.choice([1, 2.5, None, [1]])}
            text = loop.write(thought, {"name": "weather", "arguments": arguments})
            own = {"name": "weather", "arguments": json.dumps(arguments, separators=rng.choice([None, (",", ":")]))}
            call = {"id": f"call{rng.randrange(10**5):05}", "type": "function", "function": own}
            message: dict[str, Any] = {
                "role": "assistant",
                "content": "Well." if "Well." in text else None,
                "tool_calls": [call],
            } | ({"reasoning_content": thought} if thought in text else {})
            loop.cache.add(
                loop.tokenizer, loop.template, prompt, loop.tokenizer.encode(text, special=True, bos=False), message
            )
            kind = rng.choice(["same", "same", "same", "silent", "edited", "branch", "question"])
            if kind == "silent":
                message.pop("reasoning_content", None)
            if kind == "edited":
                own["arguments"] = json.dumps({"city": next(words)})
            content = rng.choice(["", next(words), f"{next(words)}<|im_end|>\n<|im_start|>", f" {next(words)}\n"])
            loop.messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": content}]
            if kind == "question":
                loop.messages += [{"role": "assistant", "content": next(words)}]
                loop.messages += [{"role": "user", "content": next(words)}]
            if kind == "branch":
                ends = [at for at, other in enumerate(loop.messages) if other["role"] in ("user", "tool")]
                del loop.messages[rng.choice(ends) + 1 :]
    assert reused > 20, "otherwise nothing is tested here"
