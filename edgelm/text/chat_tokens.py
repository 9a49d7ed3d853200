"""The tokens of a rendered chat: what stands for a user's text becomes no special token.

Around a placeholder, the text up to the template's own special tokens is encoded as plain text. All other text is
encoded exactly as rendered. Owns BOS, and how a text is cut so that no vocabulary finds a special token in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgelm.base.errors import RequestError
from edgelm.text.chat import Rendered, restored
from edgelm.text.encoding import chunks
from edgelm.text.pictures import NAME, PICTURE
from edgelm.text.template import ChatTemplate

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

_SPACES = " \t\n\v\f\r"  # some special tokens swallow them


def encode_rendered(tokenizer: Tokenizer, template: ChatTemplate, rendered: Rendered) -> list[int]:
    """Return the tokens of a rendered chat. Raises RequestError for characters that the vocabulary cannot write."""
    ids = encode_part(tokenizer, template, rendered)
    # `bos=True` above would also add the EOS that some models want after a text. The last turn here is still open.
    bos = tokenizer.bos_id
    if bos is not None and bos in (*ids[:1], *tokenizer.encode("", special=False, bos=True)[:1]):
        others = (index for index, token in enumerate(ids) if token != bos)
        ids[: next(others, len(ids))] = [bos]
    return ids


def encode_part(tokenizer: Tokenizer, template: ChatTemplate, rendered: Rendered) -> list[int]:
    """Return the tokens of a chat without its BOS, or of a part of one that begins with a special token.

    Raises RequestError for characters that the vocabulary cannot write.
    """
    names = {char: name for char, name in rendered.plain.items() if NAME.fullmatch(name)}
    if names:
        others = {char: text for char, text in rendered.plain.items() if char not in names}
        first, *rest = re.split(f"[{''.join(names)}]", rendered.text)
        ids = encode_part(tokenizer, template, Rendered(first, others))
        for piece in rest:
            ids += [PICTURE, *encode_part(tokenizer, template, Rendered(piece, others))]
        return ids
    ids = []
    for text, is_plain in _segments(rendered, template, tokenizer):
        if is_plain:
            ids += _encode_plain(text, rendered.plain, template, tokenizer)
        else:
            for chunk in chunks(text, template.specials):
                ids += tokenizer.encode(chunk, special=True, bos=False)
    return ids


def _segments(rendered: Rendered, template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of the text, each with whether it is plain.

    A plain piece extends from one special token of the template to the next: llama.cpp splits a text there.
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


def _stripped(run: str, before: str, plain: dict[str, str], tokenizer: Tokenizer) -> str:
    """Return a run without its leading white space if the special token before it swallows that."""
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
    hidden = frozenset(plain[char] for char in set(run) & plain.keys())
    ids = tokenizer.encode(restored(run, plain), special=False, bos=False)
    if _token_among(ids, hidden, tokenizer):
        first, *others = _cut(run, plain, template.user_defined)
        ids = tokenizer.encode(first, special=False, bos=False)
        for part in others:
            ids += _continuation(part, tokenizer)
    if strange := _token_among(ids, template.control_strings | hidden, tokenizer):
        raise RequestError(f"the model's vocabulary cannot write {strange!r} as text", "remove it")
    return ids


def _cut(run: str, plain: dict[str, str], user_defined: frozenset[str]) -> list[str]:
    """Return the text of a run, cut after the first character of each string that is a token in any text."""
    parts = [""]
    for char in run:
        text = plain.get(char, char)
        if char in plain and text in user_defined:
            parts[-1] += text[:1]
            parts.append(text[1:])
        else:
            parts[-1] += text
    return parts


def _token_among(ids: list[int], strings: frozenset[str], tokenizer: Tokenizer) -> str:
    """Return the first string that is one of the tokens; empty: none is."""
    return next((text for text in map(tokenizer.text_of, set(ids)) if text in strings), "")


def _continuation(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text that follows another, without the space that some vocabularies put first."""
    for guard in ("\n", "\t", ".", "a"):
        head = tokenizer.encode(guard, special=False, bos=False)
        whole = tokenizer.encode(guard + text, special=False, bos=False)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    raise RequestError(f"the model's vocabulary cannot write {text[:40]!r} in pieces", "remove it")
