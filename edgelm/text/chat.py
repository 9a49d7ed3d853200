"""From messages to the tokens of a prompt, so that only the template writes special tokens.

Where a message holds the string of a special token, one character that the chat does not hold stands for it while the
template runs. Afterwards the text around it, up to the template's own special tokens, is encoded as plain text; all
else is encoded exactly as the rendered text.

Owns the form of messages that templates read, these placeholders, and BOS. Knows nothing of processes: what is called
here may run as long as the template likes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgelm.errors import RequestError
from edgelm.text.template import ChatTemplate, Message, TemplateFailedError, too_long

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

# Printable letters without case that next to nobody writes (CJK extension B): no filter of a template changes them.
_PLACEHOLDERS = range(0x20000, 0x2A6E0)
_MAX_DEPTH = 64
_SPACES = " \t\n\v\f\r"  # what some special tokens swallow behind them
_CHUNK = 64  # special tokens
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a chat, and what some of its characters stand for."""

    text: str
    plain: dict[str, str] = field(default_factory=dict)  # placeholder: what a user wrote


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    max_bytes: int | None = None,
    **kwargs: Any,
) -> list[int]:
    """Return the tokens of a conversation, with one BOS where the model wants it.

    Raises what `render_chat` and `encode_rendered` do.
    """
    rendered = render_chat(
        template,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        max_bytes=max_bytes,
        **kwargs,
    )
    return encode_rendered(tokenizer, template, rendered)


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    max_bytes: int | None = None,
    **kwargs: Any,
) -> Rendered:
    """Render a conversation in OpenAI's form; see ChatTemplate.render for the rest.

    Raises RequestError for messages that are none, and what the template raises.
    """
    messages = [_as_templates_read(message, template) for message in messages]
    chat = {"messages": messages, "tools": tools, **kwargs}
    hidden = _Placeholders(chat, template)
    chat = hidden.hide_markers(chat)
    text = _render_forms(template, chat, add_generation_prompt=add_generation_prompt, max_bytes=max_bytes)
    _check_controls(template, chat, hidden, text, add_generation_prompt)
    text, plain = hidden.unescaped(text)
    if plain and max_bytes is not None and len(_restored(text, plain).encode("utf-8", "surrogatepass")) > max_bytes:
        raise too_long(max_bytes)
    return Rendered(text, plain)


def encode_rendered(tokenizer: Tokenizer, template: ChatTemplate, rendered: Rendered) -> list[int]:
    """Return the tokens of a rendered chat. Raises RequestError for what the vocabulary cannot write."""
    ids = encode_part(tokenizer, template, rendered)
    # Not `bos=True` above: it would add the EOS that some models want behind a text, here behind an open turn.
    bos = tokenizer.bos_id
    if bos is not None and bos in (*ids[:1], *tokenizer.encode("", special=False, bos=True)[:1]):
        others = (index for index, token in enumerate(ids) if token != bos)
        ids[: next(others, len(ids))] = [bos]
    return ids


def encode_part(tokenizer: Tokenizer, template: ChatTemplate, rendered: Rendered) -> list[int]:
    """Return the tokens of a part of a rendered chat that begins with a special token, or of a chat without its BOS.

    Raises RequestError for what the vocabulary cannot write.
    """
    ids: list[int] = []
    for text, is_plain in _segments(rendered, template, tokenizer):
        if is_plain:
            ids += _encode_plain(text, rendered.plain, template, tokenizer)
        else:
            for chunk in _chunks(text, template):
                ids += tokenizer.encode(chunk, special=True, bos=False)
    return ids


def _as_templates_read(message: Message, template: ChatTemplate) -> Message:
    """Return a message in the form that templates are written for.

    That is what transformers gives them: text content, arguments as objects, no empty fields, reasoning by all names.
    """
    if not isinstance(message.get("role"), str):
        raise RequestError("a message has no role", "give each message a role and content")
    read = {name: value for name, value in message.items() if value is not None}
    read["content"] = _text_of(message.get("content"))
    if read["role"] == "developer" and "developer" not in template.source:
        read["role"] = "system"
    reasoning = next((read[name] for name in _REASONING if name in read), None)
    if reasoning is not None:
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    if "tool_calls" in read:
        read["tool_calls"] = [_as_object(call) for call in read["tool_calls"]]
    return read


def _text_of(content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("the content of a message is neither text nor a list of parts", "send it as text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"a message holds a part of type {str(kind)[:40]!r}", "send text: the model reads no other"
            )
        texts.append(part["text"])
    return "".join(texts)


def _as_object(call: Any) -> Any:
    """Return a tool call with its arguments as an object, where they are one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _render_forms(template: ChatTemplate, chat: dict[str, Any], **options: Any) -> str:
    """Render a chat, in forms that fewer templates are written for where one cannot read the first."""
    try:
        return template.render(**chat, **options)
    except TemplateFailedError as error:
        first = error
    texts = [_with_text(message) for message in chat["messages"]]
    strings = [_with_argument_strings(message) for message in texts]
    forms = [{**chat, "messages": each, "tools": chat["tools"] or []} for each in (chat["messages"], texts, strings)]
    for form in forms:
        if form != chat:
            try:
                return template.render(**form, **options)
            except TemplateFailedError:
                pass
    raise first


def _with_text(message: Message) -> Message:
    return message if message["content"] is not None else {**message, "content": ""}


def _with_argument_strings(message: Message) -> Message:
    def written(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return {**message, "tool_calls": list(map(written, message["tool_calls"]))} if "tool_calls" in message else message


class _Placeholders:
    """Gives strings of one chat a character that stands for them, each character for one string."""

    def __init__(self, chat: dict[str, Any], template: ChatTemplate) -> None:
        self._template = template
        self._chat = chat
        self._free: Iterator[str] | None = None
        self._of: dict[str, str] = {}  # string: its placeholder

    def hide_markers(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Return the chat with placeholders for markers.

        What a model wrote keeps its user-defined ones, such as `<think>`: templates look for them, and the prefix
        cache holds their tokens.
        """
        control, markers = self._hider(self._template.control), self._hider(self._template.markers)
        messages = [_mapped(each, control if each["role"] == "assistant" else markers) for each in chat["messages"]]
        rest = {name: _mapped(value, markers) for name, value in chat.items() if name != "messages"}
        return {"messages": messages, **rest}

    def disarm(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Return the chat with placeholders for characters without which there is no control string."""
        strings = self._template.control_strings
        signs = {next((char for char in text if not (char.isalnum() or char in " _")), "") for text in strings} - {""}
        pattern = re.compile(f"[{re.escape(''.join(sorted(signs)))}]" if signs else "(?!)")
        return {name: _mapped(value, self._hider(pattern)) for name, value in chat.items()}

    def unescaped(self, text: str) -> tuple[str, dict[str, str]]:
        """Return a rendered text and what its placeholders stand for, also of those that a filter escaped."""
        for string, char in list(self._of.items()):
            escape = _escape(char)
            if escape in text:
                text = text.replace(escape, self._placeholder(_escape(string)))
        return text, {char: string for string, char in self._of.items() if char in text}

    def _hider(self, pattern: re.Pattern[str]) -> Callable[[str], str]:
        return lambda text: pattern.sub(lambda match: self._placeholder(match[0]), text)

    def _placeholder(self, string: str) -> str:
        if string not in self._of:
            if self._free is None:
                self._free = self._free_characters()
            char = next(self._free, None)
            if char is None:
                raise RequestError("the messages hold every rare character there is", "leave some out")
            self._of[string] = char
        return self._of[string]

    def _free_characters(self) -> Iterator[str]:
        strings: list[str] = [self._template.source]

        def collect(text: str) -> str:
            strings.append(text)
            return text

        _mapped(self._chat, collect)
        taken = "\n".join(strings)
        rare = frozenset(re.findall(f"[{chr(_PLACEHOLDERS[0])}-{chr(_PLACEHOLDERS[-1])}]", taken))
        escapes = r"\ud8" in taken.lower()
        for code in _PLACEHOLDERS:
            if chr(code) not in rare and not (escapes and _escape(chr(code)) in taken.lower()):
                yield chr(code)


def _mapped(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Return a value of JSON with all its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if depth > _MAX_DEPTH:
        raise RequestError(f"the messages are nested more than {_MAX_DEPTH} deep", "send them flatter")
    if isinstance(value, dict):
        return {change(str(key)): _mapped(each, change, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, change, depth + 1) for each in value]
    return value


def _escape(text: str) -> str:
    """Return a text as JSON in ASCII writes it, without quotes."""
    return json.dumps(text)[1:-1]


def _check_controls(
    template: ChatTemplate, chat: dict[str, Any], hidden: _Placeholders, text: str, add_generation_prompt: bool
) -> None:
    """Raise RequestError if a control string of the text is the user's: a template may build one by leaving out.

    One that replaces `/think` by nothing turns `<|im_/thinkend|>` into `<|im_end|>`. So it renders a second time what
    has none of the characters that this takes: the control strings must be the same.
    """
    disarmed = hidden.disarm(chat)
    if disarmed == chat:
        return
    own = template.control.findall(
        _render_forms(template, disarmed, add_generation_prompt=add_generation_prompt, max_bytes=None)
    )
    found = template.control.findall(text)
    if found != own:
        strange = next((each for each in found if found.count(each) != own.count(each)), found[0] if found else "")
        raise RequestError(
            f"the model's chat template would make the special token {strange!r} of what a message says",
            "write the message otherwise",
        )


def _restored(text: str, plain: dict[str, str]) -> str:
    return text.translate({ord(char): string for char, string in plain.items()})


def _segments(rendered: Rendered, template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield the text in pieces, and whether a piece is plain.

    A plain piece reaches from one special token of the template to the next, as llama.cpp divides a text.
    """
    text, plain = rendered.text, rendered.plain
    if not plain:
        yield text, False
        return
    hidden = re.compile(f"[{''.join(plain)}]")
    done, end = 0, 0
    before = ""
    for match in [*template.specials.finditer(text), None]:
        start = match.start() if match else len(text)
        if hidden.search(text, end, start):
            if done < end:
                yield text[done:end], False
            yield _stripped(text[end:start], before, plain, tokenizer), True
            done = start
        if match:
            before, end = match[0], match.end()
    if done < len(text):
        yield text[done:], False


def _chunks(text: str, template: ChatTemplate) -> Iterator[str]:
    """Yield a text in pieces of some special tokens: llama.cpp takes quadratic time for them, minutes for 100,000."""
    done = 0
    for count, match in enumerate(template.specials.finditer(text)):
        if count % _CHUNK == _CHUNK - 1:  # no token of a model that chats depends on what stands before it
            yield text[done : match.start()]
            done = match.start()
    yield text[done:]


def _stripped(run: str, before: str, plain: dict[str, str], tokenizer: Tokenizer) -> str:
    """Return a run without its first white space, where the special token before it swallows that."""
    core = run.lstrip(_SPACES)
    spaces, first = run[: len(run) - len(core)], plain.get(core[0], core)[0]
    if not spaces or not before:
        return run
    with_spaces, without = (
        tokenizer.encode(text, special=True, bos=False) for text in (before + spaces + first, before + first)
    )
    return core if with_spaces == without else run


def _encode_plain(run: str, plain: dict[str, str], template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text with placeholders, none of them special."""
    written = frozenset(plain[char] for char in set(run) & plain.keys())
    ids = tokenizer.encode(_restored(run, plain), special=False, bos=False)
    if _holds(ids, written, tokenizer):
        first, *others = _cut(run, plain, template.user_defined)
        ids = tokenizer.encode(first, special=False, bos=False)
        for part in others:
            ids += _continuation(part, tokenizer)
    if strange := _holds(ids, template.control_strings | written, tokenizer):
        raise RequestError(f"the model's vocabulary cannot write {strange!r} as text", "leave it out")
    return ids


def _cut(run: str, plain: dict[str, str], user_defined: frozenset[str]) -> list[str]:
    """Return what a run says, cut behind the first character of what llama.cpp takes for a token in any text."""
    parts = [""]
    for char in run:
        text = plain.get(char, char)
        if char in plain and text in user_defined:
            parts[-1] += text[:1]
            parts.append(text[1:])
        else:
            parts[-1] += text
    return parts


def _holds(ids: list[int], strings: frozenset[str], tokenizer: Tokenizer) -> str:
    return next((text for text in map(tokenizer.text_of, set(ids)) if text in strings), "")


def _continuation(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text that follows another: without the space that some vocabularies put first."""
    for guard in ("\n", "\t", ".", "a"):
        head = tokenizer.encode(guard, special=False, bos=False)
        whole = tokenizer.encode(guard + text, special=False, bos=False)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    raise RequestError(f"the model's vocabulary cannot write {text[:40]!r} in pieces", "leave it out")
