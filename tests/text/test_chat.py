"""A user's text never becomes a special token, and everything else is encoded as rendered."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgelm.backends.llama.api import start_backend
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import RequestError
from edgelm.text.chat import render_chat
from edgelm.text.chat_tokens import encode_rendered
from edgelm.text.template import ChatTemplate, RefusedError, TooLongError
from tests.counts import Count
from tests.real_data import vocabulary, with_vocabulary
from tests.text.test_tokenizer import finish, start_gguf
from tests.tiny import write_tiny

CHATS = Count(test=60, soak=2000)
TURNS = {  # the special tokens of each vocabulary around a turn
    "gpt-2": ("", "<|endoftext|>"),
    "llama-bpe": ("<|start_header_id|>", "<|eot_id|>"),
    "llama-spm": ("", "</s>"),
    "phi-3": ("<|user|>", "<|end|>"),
    "qwen2": ("<|im_start|>", "<|im_end|>"),
}
SPM = {"llama-spm", "phi-3"}
PROMPT = "{% if add_generation_prompt %}OPEN assistant:{% endif %}"
LOOP = "{{ bos_token }}{% for message in messages %}OPEN{{ message.role }}\n{{ message.content }}CLOSE\n{% endfor %}"
EVERYTHING = (
    "{{ [tools, documents, word]|tojson }}{{ messages|tojson }}{{ messages[0].tool_calls[0].function.arguments }}"
)
every_vocab = pytest.mark.parametrize("name", with_vocabulary(TURNS))


@pytest.fixture(autouse=True)
def _silence() -> None:
    start_backend()


@pytest.fixture(scope="module", autouse=True)
def _free_vocabularies() -> Iterator[None]:
    yield
    load.cache_clear()
    template_of.cache_clear()


@cache
def load(name: str) -> LlamaTokenizer:
    start_backend()
    return LlamaTokenizer.from_file(vocabulary(name))


@cache
def template_of(name: str, source: str = LOOP + PROMPT) -> ChatTemplate:
    own = ChatTemplate.of(load(name))
    opening, closing = TURNS[name]
    return ChatTemplate(
        source.replace("OPEN", opening).replace("CLOSE", closing),
        bos=own.bos,
        eos=own.eos,
        special_strings=own.special_strings,
        user_defined=own.user_defined,
    )


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def encode_chat(
    tokenizer: LlamaTokenizer, template: ChatTemplate, messages: list[dict[str, Any]], **options: Any
) -> list[int]:
    return encode_rendered(tokenizer, template, render_chat(template, messages, **options))


def specials_in(ids: list[int], tokenizer: LlamaTokenizer) -> Counter[str]:
    return Counter(text for text in map(tokenizer.text_of, ids) if text in tokenizer.special_strings)


def spelled(ids: list[int], tokenizer: LlamaTokenizer) -> str:
    """Return the text of tokens, with the strings of special ones."""
    strings = tokenizer.special_strings
    data = [tokenizer.piece(i) if (text := tokenizer.text_of(i)) not in strings else text.encode() for i in ids]
    return b"".join(data).decode()


def shuffled(name: str) -> str:
    """Return a text with every special string of a vocabulary, some of them with text between."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    strings = sorted(load(name).special_strings) * 2
    rng.shuffle(strings)
    return "".join(string + rng.choice(["", "", " ", "\n", "x", "<", "é", "[ "]) for string in strings)


@every_vocab
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "<|im_end|>", "</s>"])
def test_no_special_string_of_a_message_becomes_its_token(name: str, role: str) -> None:
    tokenizer, template = load(name), template_of(name)
    text = shuffled(name)
    if role == "assistant":  # the model's own messages keep user-defined tokens
        text = "".join(string for string in tokenizer.special_strings - template.user_defined)
    ids = encode_chat(tokenizer, template, [user("Hi"), {"role": role, "content": text}, user(text)])
    harmless = encode_chat(tokenizer, template, [user("Hi"), {"role": "x", "content": "y"}, user("z")])
    assert specials_in(ids, tokenizer) == specials_in(harmless, tokenizer)


@every_vocab
def test_no_special_string_from_anywhere_else_becomes_its_token(name: str) -> None:
    tokenizer, template = load(name), template_of(name, "xCLOSE" + EVERYTHING)
    text = shuffled(name)
    tools = [{"type": "function", "function": {"name": text, "parameters": {"properties": {text: {"type": text}}}}}]
    arguments = {text: [text, {"a": text, "b": 1}]}
    call = {"id": text, "type": "function", "function": {"name": "f", "arguments": arguments}}
    written = {"id": text, "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    messages = [
        user(text, name=text, tool_calls=[call, written], tool_call_id=text, extra={text: text}),
        {"role": "tool", "content": text, "reasoning_content": text},
    ]
    options = {"tools": tools, "documents": [{"text": text}], "word": text}
    rendered = render_chat(template, messages, **options)
    ids = encode_rendered(tokenizer, template, rendered)
    own = encode_chat(tokenizer, template_of(name, "xCLOSE"), [user("Hi")])
    assert specials_in(ids, tokenizer) == specials_in(own, tokenizer)
    assert len(rendered.text) > 10 * len(tokenizer.special_strings)


words = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(
        ["Hello", " world", "\n\n", "  ", "\t", "<|", "|>", "<", "s>", "[PAD", "1234", "don't", "日本", "🙂"]
    ),
)
typed = st.lists(words, max_size=8).map("".join)


@every_vocab
@settings(max_examples=CHATS)
@given(contents=st.lists(typed, min_size=1, max_size=3), prompt=st.booleans())
def test_text_without_special_strings_is_encoded_as_the_rendered_text(
    name: str, contents: list[str], prompt: bool
) -> None:
    tokenizer, template = load(name), template_of(name)
    assume(not any(map(template.specials.search, contents)))
    messages = [user(content) for content in contents]
    text = template.render(messages, add_generation_prompt=prompt)
    expected = tokenizer.encode(text, special=True, bos=True)
    assert encode_chat(tokenizer, template, messages, add_generation_prompt=prompt) == expected


@every_vocab
def test_chats_of_many_turns_are_encoded_as_the_rendered_text(name: str) -> None:
    """A long text is encoded in pieces, and some special tokens swallow white space around them."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    tokenizer, template = load(name), template_of(name)
    ends = ["", " ", "\n", "x", " x", "\n\n", "é", "[", "\t x"]
    for spaced in (False, True):
        contents = [rng.choice(ends) + rng.choice(["", "Hi"]) + rng.choice(ends) for _ in range(500)]
        messages = [user(f" {content} " if spaced else content) for content in contents]
        expected = tokenizer.encode(template.render(messages), special=True, bos=True)
        assert encode_chat(tokenizer, template, messages) == expected, f"seed {seed}"


@every_vocab
@settings(max_examples=CHATS)
@given(data=st.data(), contents=st.lists(typed, min_size=1, max_size=3))
def test_special_strings_change_the_encoding_of_their_own_turn_only(
    name: str, data: st.DataObject, contents: list[str]
) -> None:
    tokenizer, template = load(name), template_of(name)
    special = st.sampled_from(sorted(tokenizer.special_strings))
    strange = data.draw(st.lists(st.one_of(special, typed), min_size=1, max_size=5).map("".join)) + data.draw(special)
    messages = [user(content) for content in contents]
    ids = encode_chat(tokenizer, template, [*messages, user(strange), *messages])
    plain = encode_chat(tokenizer, template, [*messages, user("x"), *messages])
    opening, closing = TURNS[name]
    own = {opening, closing, template.bos} - {""}
    assert specials_in(ids, tokenizer) == specials_in(plain, tokenizer)

    def runs(tokens: list[int]) -> list[list[int]]:
        """Return the tokens between the template's special ones."""
        between: list[list[int]] = [[]]
        for token in tokens:
            between = [*between, []] if tokenizer.text_of(token) in own else [*between[:-1], [*between[-1], token]]
        return between

    before, after = runs(ids), runs(plain)
    different = [index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    assert len(different) <= 1
    text = template.render([*messages, user(strange), *messages])
    if name in SPM:  # a space (U+2581 is one, too) stands in front of each run, and some tokens swallow white space
        bare, expected = (part.replace("\u2581", " ").split() for part in (spelled(ids, tokenizer), text))
        assert "".join(bare) == "".join(expected)
    else:
        assert spelled(ids, tokenizer) == text


def test_a_turn_of_an_spm_vocabulary_is_encoded_in_one_piece() -> None:
    """A special string in it gets no space around it."""
    source = LOOP.replace("OPEN", "").replace("CLOSE", "</s>") + " assistant:"
    tokenizer, template = load("phi-3"), template_of("phi-3", source)
    ids = encode_chat(tokenizer, template, [user("a</s>b <s> c")])
    turn, rest = tokenizer.encode("user\na</s>b <s> c", special=False, bos=False), "</s>\n assistant:"
    assert ids == [1, *turn, *tokenizer.encode(rest, special=True, bos=False)]
    assert tokenizer.decode(turn) == " user\na</s>b <s> c"


def test_a_special_token_swallows_white_space() -> None:
    tokenizer = load("phi-3")  # its <|user|> takes the white space behind it
    template = template_of("phi-3", "<|user|>\n {{ messages[0].content }} \n<|end|>")
    run = tokenizer.encode("<s> \n", special=False, bos=False)
    assert encode_chat(tokenizer, template, [user("<s>")]) == [1, 32010, *run, 32007]
    assert tokenizer.encode("<|user|>\n x \n<|end|>", special=True, bos=True)[2:-1] == tokenizer.encode(
        "x \n", special=False, bos=False
    )


@every_vocab
@pytest.mark.parametrize("start", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
@pytest.mark.parametrize("content", ["Hi", "", "BOS", "BOS Hi", "x BOS"])
def test_there_is_one_bos_where_the_model_wants_one(name: str, start: str, content: str) -> None:
    tokenizer, template = load(name), template_of(name, start + "{{ messages[0].content }}")
    bos = tokenizer.encode("", special=False, bos=True)
    ids = encode_chat(tokenizer, template, [user(content.replace("BOS", template.bos))])
    count = int(bool(bos or start))
    assert ids[:count] == [tokenizer.bos_id] * count
    assert ids.count(tokenizer.bos_id or -1) == count


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content.replace('/think', '') }}", "<|im_/thinkend|>"),
        ("{{ messages[0].name }}{{ messages[0].content }}", "|im_end|>"),
        ("{{ messages[0].content|lower }}", "<|IM_END|>"),
        ("{{ messages[0].content|replace(' ', '') }}", "< |im_end|>"),
        ("{{ messages[0].content[::-1] }}", ">|dne_mi|<"),
        ("{% if '<' in messages[0].content %}<|im_end|>{% endif %}", "<"),
    ],
)
def test_a_template_that_makes_a_special_token_of_text_is_refused(source: str, content: str) -> None:
    template = ChatTemplate("<|im_end|>" + source, special_strings=frozenset({"<|im_start|>", "<|im_end|>"}))
    with pytest.raises(RequestError, match=r"into the special token '<\|im_end\|>'"):
        render_chat(template, [user(content, name="<")])
    for harmless in ("2 < 3 <b>|im_end|</b>", "Hi"):
        if "if" not in source:
            assert not render_chat(template, [user(harmless, name="x")]).plain


def test_text_of_a_user_in_escaped_json_is_still_the_users() -> None:
    special = '<|"end|>'
    template = ChatTemplate("{{ messages|tojson(ensure_ascii=true) }}", special_strings=frozenset({special}))
    typed = f"a{special}b\\ud840\\udc00 \U00020000"
    rendered = render_chat(template, [user(typed)])
    assert special not in rendered.text
    restored = "".join(rendered.plain.get(char, char) for char in rendered.text)
    assert json.loads(restored)[0]["content"] == typed


def test_characters_that_could_be_placeholders_are_left_alone() -> None:
    template = ChatTemplate("{{ messages[0].content }}", special_strings=frozenset({"<s>"}))
    rare = "".join(map(chr, range(0x20000, 0x20000 + 500)))
    rendered = render_chat(template, [user(f"{rare}<s>")])
    assert rendered.text.startswith(rare)
    assert rendered.plain == {rendered.text[-1]: "<s>"}
    assert rendered.text[-1] not in rare
    with pytest.raises(RequestError, match="every rare character"):
        render_chat(template, [user("".join(map(chr, range(0x20000, 0x2A6E0))) + "<s>")])


def write_user_defined(path: Path) -> Path:
    """Write an SPM vocabulary with user-defined tokens, of which only some are markup."""
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<think>",
        "  ",
        "7",
        "\u2581",
        "<|a\u2581b|>",
    ]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.USER_DEFINED] * 3 + [TokenType.NORMAL, TokenType.CONTROL]
    pieces = [*"abhiknt", "<t", "<th", "think>", "\u2581b", "a\u2581b", "|a\u2581b", "<|a\u2581b", "<|a\u2581b|"]
    writer = start_gguf(path, "llama")
    writer.add_token_list([*texts, *pieces])
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * len(pieces)])
    writer.add_token_scores([-float(rank) for rank in range(len(texts) + len(pieces))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
    return finish(writer, path)


def test_user_defined_tokens_are_text_unless_they_are_markup(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(write_user_defined(tmp_path / "vocab.gguf"))
    template = ChatTemplate.of(tokenizer)
    assert template.user_defined == {"<think>", "  ", "7"}
    think, spaces, seven = (tokenizer.encode(text, special=True, bos=False)[0] for text in ("<think>", "  ", "7"))

    ids = encode_chat(tokenizer, template, [user("a  7<think>b")])
    assert think not in ids
    assert spaces in ids
    assert seven in ids
    assert tokenizer.decode(ids).split() == ["a", "7", "<think>b"]
    assert "<think>b" in tokenizer.decode(ids)
    # The model's own messages keep user-defined tokens.
    ids = encode_chat(tokenizer, template, [{"role": "assistant", "content": "<think>a"}])
    assert think in ids


def test_a_control_token_with_a_space_in_it_stays_text(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(write_user_defined(tmp_path / "vocab.gguf"))
    template = ChatTemplate.of(tokenizer)
    control = next(token for token in range(tokenizer.num_tokens) if tokenizer.text_of(token) == "<|a\u2581b|>")
    assert control in tokenizer.encode("<|a b|>", special=True, bos=False)
    for text in ("<|a b|>", "<|a\u2581b|>"):
        assert control not in encode_chat(tokenizer, template, [user(text)])


def echo(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return render_chat(ChatTemplate(source), list(messages), **options).text


def test_parts_of_text_are_joined_and_other_parts_refused() -> None:
    source = "{{ messages[0].content }}"
    assert echo(source, user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])) == "ab"
    template = ChatTemplate(source, special_strings=frozenset({"<s>"}))
    split = [{"type": "text", "text": "<"}, {"type": "text", "text": "s>"}]
    assert list(render_chat(template, [user(split)]).plain.values()) == ["<s>"]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    for content in ([image], [{"type": "text"}], ["a"], 3, {"type": "text", "text": "a"}):
        with pytest.raises(RequestError, match=r"a part of type|neither text nor"):
            echo(source, user(content))
    with pytest.raises(RequestError, match="no role"):
        echo(source, {"content": "a"})


def call_of(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_messages_reach_the_template_in_the_form_it_reads() -> None:
    arguments = "{{ messages[0].tool_calls[0].function.arguments"
    for written in ('{"b": 1}', {"b": 1}):
        assert echo(arguments + "|tojson }}", call_of(written)) == '{"b": 1}'
        assert echo("{{ 'x' + messages[0].tool_calls[0].function.arguments }}", call_of(written)) == 'x{"b": 1}'
        assert echo(arguments + "['b'] }}{{ messages[0].content is none }}", call_of(written)) == "1False"
        assert echo("{{ 'x' + messages[0].content }}", call_of(written)) == "x"
    for cut in ('{"city": "Zür', "[1]", "3"):
        assert json.loads(echo(arguments + "|tojson }}", call_of(cut))) == {"__raw": cut}
    for empty in ("", " ", None):
        assert echo(arguments + "|tojson }}", call_of(empty)) == "{}"
    assert echo("{{ messages[0].content is string }}", {"role": "assistant", "content": None}) == "True"

    assert echo("{{ messages[0].role }}", {"role": "developer", "content": "a"}) == "system"
    roles = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{# developer #}"
    assert echo(roles, {"role": "developer", "content": "a"}) == "developera"
    without = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}{# developer #}"
    assert echo(without, {"role": "developer", "content": "a"}) == "a"
    assert (
        echo("{{ 'name' in messages[0] }}{{ 'tool_calls' in messages[0] }}", user("a", name=None, tool_calls=None))
        == "FalseFalse"
    )
    assert echo("{{ messages[0].thinking }}", user("a", reasoning_content="r")) == "r"
    assert echo("{% for tool in tools %}{% endfor %}{{ tools|length }}", user("a")) == "0"
    assert echo("{{ tools is none }}", user("a")) == "True"


def test_a_refusal_has_the_templates_own_message(tmp_path: Path) -> None:
    source = "{{ raise_exception('After the system message, roles must alternate') }}"
    tokenizer = LlamaTokenizer.from_file(write_tiny(tmp_path / "tiny.gguf", vocab_only=True, chat_template=source))
    with pytest.raises(RefusedError) as caught:
        encode_chat(tokenizer, ChatTemplate.of(tokenizer), [user("Hi")])
    assert caught.value.message == "After the system message, roles must alternate"


def test_the_size_of_a_chat_is_bounded_by_what_is_encoded() -> None:
    template = ChatTemplate("{{ messages[0].content }}", special_strings=frozenset({"<|special|>"}))
    assert render_chat(template, [user("é" * 50)], max_bytes=100).text == "é" * 50
    for content in ("é" * 51, "<|special|>" * 10):
        with pytest.raises(TooLongError, match="more than 100 bytes"):
            render_chat(template, [user(content)], max_bytes=100)


def test_messages_that_are_nested_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = {"x": deep}
    with pytest.raises(RequestError, match="more than 64 deep"):
        echo("x", user("a"), documents=deep)
    assert echo("{{ messages[0].tool_calls[0].function.arguments|length }}", call_of("[" * 99_999)) == "1"


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(write_tiny(tmp_path / "tiny.gguf", vocab_only=True))
    for content in ("\ud800", "<s>\ud800"):
        with pytest.raises(RequestError, match="half a character"):
            encode_chat(tokenizer, ChatTemplate.of(tokenizer), [user(content)])
