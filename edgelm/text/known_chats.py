"""KnownChats: the tokens of conversations as they were generated, found again by the text that a template makes.

An answer's text, encoded again, may give other ids than the model generated, and a prefix of KV serves equal ids only.
So where a rendered chat begins with what is known, its ids are taken, and the rest is encoded alone.

    known     <|user|>Hi<|end|><|assistant|>Hello      there.
    rendered  <|user|>Hi<|end|><|assistant|>Hello there.│<|end|><|user|>How are you?…
                                                        cut: a token ends here, and a special one begins

A text is cut only before a special token of the template: there llama.cpp divides a text anyway, so the rest is encoded
as in the whole. Two texts are equal if what their placeholders stand for is (chat.py): so what a user wrote is never
taken for a special token, or the other way round. An answer that itself wrote a special string, or sampled a control
token, is not learnt. What one owner wrote serves no other.

Owns the store, its bound and its file. Knows nothing of where the KV is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelm.text.chat import Rendered, encode_part, encode_rendered
from edgelm.text.template import ChatTemplate

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

MAX_CHATS = 256
MAX_CHARS = 2**21  # of all texts together
_MAGIC = "edgelm chats 1"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered chat and its tokens. `cuts` are, in ascending order, how many characters are how many tokens."""

    ids: list[int]
    rendered: Rendered
    cuts: dict[int, int]
    owner: str = ""


class KnownChats:
    """The conversations of one model, the last used ones. Safe to call from several threads.

    `path` is a file that outlives the process; one that is damaged is ignored and deleted.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._chats: list[Prompt] = []  # least recently used first
        self._unread = path is not None
        self._changed = False

    def encode(self, tokenizer: Tokenizer, template: ChatTemplate, rendered: Rendered, owner: str = "") -> Prompt:
        """Return the tokens of a rendered chat: those that are known, and of the rest its own.

        Raises RequestError for what the vocabulary cannot write.
        """
        starts = [match.start() for match in template.specials.finditer(rendered.text)]
        with self._lock:
            self._read(tokenizer)
            chars, known = self._longest(rendered, starts, owner)
        if known is None:
            ids = encode_rendered(tokenizer, template, rendered)
            return Prompt(ids, rendered, _special_cuts(rendered.text, ids, template, tokenizer), owner)
        count = known.cuts[chars]
        rest = Rendered(rendered.text[chars:], rendered.plain)
        new = encode_part(tokenizer, template, rest)
        cuts = {at: tokens for at, tokens in known.cuts.items() if at <= chars}
        for at, tokens in _special_cuts(rest.text, new, template, tokenizer).items():
            cuts[chars + at] = count + tokens
        return Prompt(known.ids[:count] + new, rendered, cuts, owner)

    def add(self, tokenizer: Tokenizer, template: ChatTemplate, prompt: Prompt, answer: Sequence[int]) -> None:
        """Learn what a model answered to a prompt, up to a token that ends it."""
        pieces: list[bytes] = []
        for token in answer:
            if token in tokenizer.stop_ids:
                break
            pieces.append(tokenizer.piece(token))
        ids = list(answer[: len(pieces)])
        text = b"".join(pieces).decode("utf-8", "ignore")
        rare = prompt.rendered.plain.keys() & set(text)
        if rare or template.control.search(text) or not all(pieces):
            return
        learnt = _followed(prompt, ids, pieces)
        with self._lock:
            self._chats = [each for each in self._chats if not _continues(learnt, each)]
            self._chats.append(learnt)
            self._shrink()
            self._changed = True

    def save(self) -> None:
        """Write the file, if anything was learnt since. A disk that fails costs a line in the log."""
        with self._lock:
            if self._path is None or not self._changed:
                return
            self._changed = False
            chats = [
                [each.owner, each.rendered.text, each.rendered.plain, each.ids, list(each.cuts.items())]
                for each in self._chats
            ]
        body = json.dumps(chats)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            with os.fdopen(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(f"{_MAGIC} {zlib.crc32(body.encode())}\n{body}")
            partial.replace(self._path)
        except OSError as error:
            log.warning("%s is not written: %s", self._path, error.strerror or error)
            with contextlib.suppress(OSError):
                partial.unlink()

    # --------------------------------------------------------------------------------------------------------------

    def _longest(self, rendered: Rendered, starts: list[int], owner: str) -> tuple[int, Prompt | None]:
        """Return where to cut, and the chat that is known up to there."""
        best, found = 0, None
        for chat in self._chats:
            if chat.owner != owner:
                continue
            common = _common_len(chat.rendered, rendered)
            at = next((at for at in reversed(starts) if best < at <= common and chat.cuts.get(at)), 0)
            if at:
                best, found = at, chat
        if found:
            self._chats.remove(found)
            self._chats.append(found)
        return best, found

    def _shrink(self) -> None:
        total = sum(len(each.rendered.text) for each in self._chats)
        while len(self._chats) > MAX_CHATS or (total > MAX_CHARS and len(self._chats) > 1):
            total -= len(self._chats.pop(0).rendered.text)

    def _read(self, tokenizer: Tokenizer) -> None:
        """Read the file, once."""
        if not self._unread or self._path is None:
            return
        self._unread = False
        try:
            with self._path.open(encoding="utf-8") as file:
                head, body = file.readline(), file.read()
            if head != f"{_MAGIC} {zlib.crc32(body.encode())}\n":
                raise ValueError("it is not what was written")
            chats = [_chat_of(each, tokenizer.num_tokens) for each in json.loads(body)]
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read: %s", self._path, error.strerror or error)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s is deleted: %s", self._path, error)
            with contextlib.suppress(OSError):
                self._path.unlink()
        else:
            self._chats = chats + self._chats
            self._shrink()


def _chat_of(fields: Any, num_vocab: int) -> Prompt:
    """Return a chat of the file. Raises ValueError or TypeError if it cannot be one."""
    owner, text, plain, ids, cuts = fields
    tokens = array("i", ids).tolist()
    if not isinstance(owner, str) or not isinstance(text, str) or not all(0 <= each < num_vocab for each in tokens):
        raise ValueError("a conversation in it is none")
    pairs = {int(at): int(count) for at, count in cuts}
    if any(not 0 <= at <= len(text) or not 0 <= count <= len(tokens) for at, count in pairs.items()):
        raise ValueError("a conversation in it is none")
    return Prompt(tokens, Rendered(text, dict(plain)), pairs, owner)


def _common_len(one: Rendered, other: Rendered) -> int:
    """Return how many leading characters are equal and stand for the same."""
    low, high = 0, min(len(one.text), len(other.text))
    if not other.text.startswith(one.text[:high]):
        while high - low > 1:
            middle = (low + high) // 2
            if one.text[low:middle] == other.text[low:middle]:
                low = middle
            else:
                high = middle
        high = low
    for char in one.plain.keys() | other.plain.keys():
        if one.plain.get(char) != other.plain.get(char) and (at := one.text.find(char, 0, high)) >= 0:
            high = at
    return high


def _continues(chat: Prompt, other: Prompt) -> bool:
    """Tell whether `chat` knows all that `other` does."""
    return (
        chat.owner == other.owner
        and chat.ids[: len(other.ids)] == other.ids
        and chat.cuts.items() >= other.cuts.items()
    )


def _followed(prompt: Prompt, ids: list[int], pieces: Iterable[bytes]) -> Prompt:
    """Return a prompt with its answer, which can be cut behind each token that ends a character."""
    text, cuts, rest = prompt.rendered.text, dict(prompt.cuts), b""
    for count, piece in enumerate(pieces, len(prompt.ids) + 1):
        rest += piece
        try:
            text += rest.decode()
        except UnicodeDecodeError:
            continue
        rest = b""
        cuts[len(text)] = count
    return Prompt(prompt.ids + ids, Rendered(text, prompt.rendered.plain), cuts, prompt.owner)


def _special_cuts(text: str, ids: list[int], template: ChatTemplate, tokenizer: Tokenizer) -> dict[int, int]:
    """Return where the special tokens of a text stand among its ids; nothing where that is not plain to see."""
    names = {token: tokenizer.text_of(token) for token in set(ids)}
    special = {token for token, name in names.items() if name in template.special_strings}
    places = [index for index, token in enumerate(ids) if token in special]
    matches = list(template.specials.finditer(text))
    if len(places) == len(matches) + 1 and places[0] == 0 and ids[0] == tokenizer.bos_id:
        del places[0]  # the model wants one, and the template writes none
    if len(places) != len(matches):
        return {}
    if any(names[ids[place]] != match[0] for place, match in zip(places, matches, strict=True)):
        return {}
    return {match.start(): place for place, match in zip(places, matches, strict=True) if place}
