"""Fill in the middle: prompts of a text before and a text after the answer, for models trained with marks for them.

Owns the table of marks. Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from edgelm.base.errors import RequestError

if TYPE_CHECKING:
    from edgelm.text.encoding import TextEncoder
    from edgelm.text.tokenizer import Tokenizer

# Marks before the prefix, before the suffix, and before the answer.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, Granite, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral; the answer follows the prefix
# Marks before the name of a repository, and before the name of each of its files.
_REPOSITORY_MARKS = (
    ("<|repo_name|>", "<|file_sep|>"),  # Qwen 2.5 Coder
    ("<repo_name>", "<file_sep>"),  # StarCoder 2
    ("<reponame>", "<file_sep>"),
)
REPOSITORY = "myproject"  # llama-server's name, which clients cannot change
FILE = "filename"  # of the file that is filled in: clients do not send it
SNIPPET = "\n\n--- snippet ---\n\n"  # before a file, for a vocabulary without marks of files
LONGEST_TOKEN = 32  # characters; longer ones are rare


def fim_tokens(texts: TextEncoder, prefix: str, suffix: str) -> Iterator[list[int]]:
    """Yield the prompt whose answer stands between two texts, a piece at a time.

    Raises RequestError if the model has no marks for it.
    """
    yield _bos(texts)
    yield from _marked(texts, texts.plain(prefix), texts.plain(suffix))


def infill_tokens(
    texts: TextEncoder, prefix: str, suffix: str, files: Sequence[tuple[str, str]], room: int
) -> list[int]:
    """Return a prompt of at most `room` tokens: the end of the prefix, the beginning of the suffix, the last files.

    `files` are names and texts, the most useful one last. A name is a label in the prompt, and no path. Raises
    RequestError if the model has no marks for it.
    """
    bos, widest = _bos(texts), room * LONGEST_TOKEN
    left = max(room - len(bos) - sum(map(len, _marked(texts, (), ()))), 0)
    before = list(chain.from_iterable(texts.plain(prefix[-widest:])))
    after = list(chain.from_iterable(texts.plain(suffix[:widest])))
    before = before[max(len(before) - max(left - len(after), left * 3 // 4), 0) :]
    after = after[: left - len(before)]
    left -= len(before) + len(after)
    ids = chain.from_iterable(_marked(texts, [before], [after]))
    return [*bos, *_repository(texts, files, left), *ids]


def _bos(texts: TextEncoder) -> list[int]:
    tokenizer = texts.tokenizer
    return tokenizer.encode("", special=False, bos=True)[:1] if tokenizer.bos_id is not None else []


def _marked(texts: TextEncoder, prefix: Iterable[list[int]], suffix: Iterable[list[int]]) -> Iterator[list[int]]:
    """Yield the tokens of two texts, with the marks around them. Raises RequestError if the model has none."""
    tokenizer = texts.tokenizer
    strings = tokenizer.special_strings
    suffix_first = all(mark in strings for mark in _SUFFIX_FIRST)
    marks = find_marks(strings)
    if marks is None and not suffix_first:
        raise RequestError("the model has no tokens for filling in", "omit suffix, or use a model for code")
    before, between, *after = (_mark(tokenizer, mark) for mark in (_SUFFIX_FIRST if suffix_first else marks or ()))
    yield before
    yield from suffix if suffix_first else prefix
    yield between
    yield from prefix if suffix_first else suffix
    yield from after


def _repository(texts: TextEncoder, files: Sequence[tuple[str, str]], room: int) -> list[int]:
    """Return the tokens of the last files that fit whole, and of the name of the one that is filled in."""
    tokenizer = texts.tokenizer
    marks = next((marks for marks in _REPOSITORY_MARKS if all(mark in tokenizer.special_strings for mark in marks)), ())
    repository_mark, file_mark = (_mark(tokenizer, mark) for mark in marks) if marks else ([], [])
    head, end = [*repository_mark], [*file_mark]
    if marks:
        head += chain.from_iterable(texts.plain(f"{REPOSITORY}\n"))
        end += chain.from_iterable(texts.plain(f"{FILE}\n"))
    blocks: list[list[int]] = []  # the last file first
    left = room - len(head) - len(end)
    for name, text in reversed(files):
        file = f"{name}\n{text}" if marks else SNIPPET + text
        if len(file) > room * LONGEST_TOKEN:
            break
        block = [*file_mark, *chain.from_iterable(texts.plain(file))]
        left -= len(block)
        if left < 0:
            break
        blocks.append(block)
    return [*head, *chain.from_iterable(reversed(blocks)), *end] if blocks else []


def find_marks(strings: Collection[str]) -> tuple[str, str, str] | None:
    """Return the marks that a vocabulary has."""
    return next((marks for marks in _MARKS if all(mark in strings for mark in marks)), None)


def _mark(tokenizer: Tokenizer, mark: str) -> list[int]:
    return tokenizer.encode(mark, special=True, bos=False)
