"""PromptTokenCache: the token ids of recent conversations, looked up by the rendered text of a chat.

Encoding an answer's text again may give other ids than the model generated, and the prefix cache matches equal ids
only. So the ids of the longest cached beginning are reused, and only the rest of the chat is encoded.

    cached    <|user|>Hi<|end|><|assistant|>Hello there.
    rendered  <|user|>Hi<|end|><|assistant|>Hello there.│<|end|><|user|>How are you?…
                                                        cut: a token ends here, and a special token begins

A text is cut only before a special token of the template. llama.cpp splits a text there anyway, so the rest gets the
same ids as in the whole. Two texts are equal only if their placeholders (chat.py) stand for the same strings, so a
user's text never matches a special token. An answer that spells a special string is not cached. An entry serves only
its own cache_namespace.

The template may write an answer in another way than the model did: a call's arguments with other spaces, the reasoning
with other line breaks. So an answer is also known by the message that the client got (a `Turn`). Where the history
has that message again, the text that the model generated replaces the template's. Not so where the template omits the
message's reasoning, as many do for older turns: then the model is to see the shorter text.

Owns the entries, their limit and their file. Knows nothing of the KV cache.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgelm.base.atomic import atomic_write
from edgelm.text.chat import Rendered
from edgelm.text.chat_tokens import encode_part, encode_rendered
from edgelm.text.history import turn_key
from edgelm.text.message_forms import reasoning_of
from edgelm.text.patterns import any_of
from edgelm.text.pictures import PICTURE
from edgelm.text.template import ChatTemplate, Message

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

MAX_ENTRIES = 256
MAX_CHARS = 2**21  # of all entries together
_MAGIC = "edgelm chats 1"

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """An answer in the text of a conversation, without the token that ended it."""

    message: int  # its number in the conversation
    key: str  # the turn_key of the message
    start: int
    end: int
    has_reasoning: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered chat and its tokens. The first `at` characters are the first `cuts[at]` tokens; `at` ascends."""

    ids: list[int]
    rendered: Rendered
    cuts: dict[int, int]
    cache_namespace: str = ""
    turns: tuple[Turn, ...] = ()  # the answers in it with their generated text, in order
    num_messages: int | None = None  # of the request; None: its answer is not a message of its own


class PromptTokenCache:
    """The most recently used conversations of one model. Safe to call from several threads.

    `path` is a file that outlives the process; a damaged one is ignored and deleted.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._entries: list[Prompt] = []  # least recently used first
        self._unread = path is not None
        self._changed = False

    def encode(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        rendered: Rendered,
        cache_namespace: str = "",
        messages: Sequence[Message] | None = None,
    ) -> Prompt:
        """Return the tokens of a rendered chat: cached ones as far as they match, then newly encoded ones.

        `messages` are those of the request; with them, answers get the text that was generated. Raises RequestError
        for characters that the vocabulary cannot write.
        """
        keys = [turn_key(message) if message["role"] == "assistant" else "" for message in messages or ()]
        with self._lock:
            self._read_once(tokenizer)
            rendered, turns = self._with_generated_text(tokenizer, rendered, keys, cache_namespace)
            starts = [match.start() for match in template.specials.finditer(rendered.text)]
            chars, entry = self._longest_match(rendered, starts, cache_namespace)
        count = None if messages is None else len(messages)
        if entry is None:
            ids = encode_rendered(tokenizer, template, rendered)
            cuts = _special_cuts(rendered.text, ids, template, tokenizer)
            return Prompt(ids, rendered, cuts, cache_namespace, turns, count)
        num_cached = entry.cuts[chars]
        rest = Rendered(rendered.text[chars:], rendered.plain)
        new = encode_part(tokenizer, template, rest)
        cuts = {at: count for at, count in entry.cuts.items() if at <= chars}
        for at, number in _special_cuts(rest.text, new, template, tokenizer).items():
            cuts[chars + at] = num_cached + number
        return Prompt(entry.ids[:num_cached] + new, rendered, cuts, cache_namespace, turns, count)

    def add(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        prompt: Prompt,
        answer: Sequence[int],
        message: Message | None = None,
    ) -> None:
        """Cache a prompt with its answer, up to the token that ends the answer.

        `message` is the message that the client gets: content, reasoning_content and tool_calls as far as it has them.
        Without it, an answer that samples a control token is not cached.
        """
        ends = [index for index, token in enumerate(answer) if token in tokenizer.stop_ids]
        ids = list(answer[: ends[0]] if ends else answer)
        pieces = [tokenizer.piece(token) for token in ids]
        controls = [not piece for piece in pieces]
        if message is None and any(controls):
            return
        for index, token in enumerate(ids):
            if controls[index]:
                pieces[index] = tokenizer.text_of(token).encode()
        text = b"".join(pieces).decode("utf-8", "ignore")
        if prompt.rendered.plain.keys() & set(text) or _spells_control(pieces, controls, template):
            return
        entry = _with_answer(prompt, ids, pieces)
        if message is not None and ends and prompt.num_messages is not None:
            start, end = len(prompt.rendered.text), len(entry.rendered.text)
            turn = Turn(prompt.num_messages, turn_key(message), start, end, bool(reasoning_of(message).strip()))
            entry = replace(entry, turns=(*prompt.turns, turn))
        with self._lock:
            self._entries = [other for other in self._entries if not _contains(entry, other)]
            self._entries.append(entry)
            self._evict()
            self._changed = True

    def save(self) -> None:
        """Write the file if anything was added. Log a disk that fails."""
        with self._lock:
            if self._path is None or not self._changed:
                return
            self._changed = False
            rows = [
                (e.cache_namespace, e.rendered.text, e.rendered.plain, e.ids, list(e.cuts.items()), e.turns)
                for e in self._entries
            ]
        body = json.dumps(rows).encode()
        try:
            atomic_write(self._path, f"{_MAGIC} {zlib.crc32(body)}\n".encode(), body)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror or error)

    # --------------------------------------------------------------------------------------------------------------

    def _with_generated_text(
        self, tokenizer: Tokenizer, rendered: Rendered, keys: Sequence[str], cache_namespace: str
    ) -> tuple[Rendered, tuple[Turn, ...]]:
        """Return the chat with the generated text of as many answers as an entry has, and these answers."""
        best: Rendered = rendered
        best_turns: tuple[Turn, ...] = ()
        if not rendered.spans:
            return best, best_turns
        stops = any_of(map(tokenizer.text_of, tokenizer.stop_ids))
        for entry in reversed(self._entries):
            if entry.cache_namespace == cache_namespace and len(entry.turns) > len(best_turns):
                result, turns = _replayed(entry, rendered, keys, stops)
                if len(turns) > len(best_turns):
                    best, best_turns = result, turns
        return best, best_turns

    def _longest_match(self, rendered: Rendered, starts: list[int], cache_namespace: str) -> tuple[int, Prompt | None]:
        """Return where to cut, and the entry with the same text up to there. `starts`: of the special tokens."""
        best, match = 0, None
        for entry in self._entries:
            if entry.cache_namespace != cache_namespace:
                continue
            common = _common_len(entry.rendered, rendered)
            at = next((at for at in reversed(starts) if best < at <= common and entry.cuts.get(at)), 0)
            if at:
                best, match = at, entry
        if match:
            self._entries.remove(match)
            self._entries.append(match)
        return best, match

    def _evict(self) -> None:
        total = sum(len(entry.rendered.text) for entry in self._entries)
        while len(self._entries) > MAX_ENTRIES or (total > MAX_CHARS and len(self._entries) > 1):
            total -= len(self._entries.pop(0).rendered.text)

    def _read_once(self, tokenizer: Tokenizer) -> None:
        """Read the file at the first call."""
        if not self._unread or self._path is None:
            return
        self._unread = False
        try:
            with self._path.open(encoding="utf-8") as file:
                head, body = file.readline(), file.read()
            if head != f"{_MAGIC} {zlib.crc32(body.encode())}\n":
                raise ValueError("its checksum or format is wrong")
            entries = [_entry(row, tokenizer.num_tokens) for row in json.loads(body)]
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read: %s", self._path, error.strerror or error)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s is deleted: %s", self._path, error)
            with contextlib.suppress(OSError):
                self._path.unlink()
        else:
            self._entries = entries + self._entries
            self._evict()


def _entry(row: Any, num_vocab: int) -> Prompt:
    """Return the entry of a row of the file. Raises ValueError or TypeError for an invalid row."""
    cache_namespace, text, plain, ids, cuts, *rest = row
    tokens = array("i", ids).tolist()
    if (
        not isinstance(cache_namespace, str)
        or not isinstance(text, str)
        or not all(0 <= token < num_vocab or token == PICTURE for token in tokens)
    ):
        raise ValueError("a conversation in it is invalid")
    pairs = {int(at): int(count) for at, count in cuts}
    if any(not 0 <= at <= len(text) or not 0 <= count <= len(tokens) for at, count in pairs.items()):
        raise ValueError("a conversation in it is invalid")
    turns = tuple(Turn(*turn) for turn in (rest[0] if rest else ()))
    places = [place for turn in turns for place in (turn.start, turn.end)]
    if places != sorted(places) or (places and not 0 <= places[0] <= places[-1] <= len(text)):
        raise ValueError("a conversation in it is invalid")
    return Prompt(tokens, Rendered(text, dict(plain)), pairs, cache_namespace, turns)


def _replayed(
    entry: Prompt, rendered: Rendered, keys: Sequence[str], stops: re.Pattern[str]
) -> tuple[Rendered, tuple[Turn, ...]]:
    """Return a chat with the text of an entry as far as the entry's answers are those of the chat.

    Between two answers both texts are the same, but for the end of the generation prompt: the template may write less
    before an answer of the history, or more.
    """
    spans = {span.message: span for span in rendered.spans}
    turns: list[Turn] = []
    at, done = 0, 0  # the ends of the equal parts: in the chat, in the entry
    for turn in entry.turns:
        span = spans.get(turn.message)
        if span is None or keys[turn.message] != turn.key or (turn.has_reasoning and not span.shows_reasoning):
            break
        others = [other for other in rendered.spans if other.message != turn.message]
        before = max((other.last for other in others if other.first < span.first), default=-1)
        behind = min((other.first for other in others if other.first > span.first), default=len(rendered.text))
        prompt = Rendered(entry.rendered.text[done : turn.start], entry.rendered.plain)
        equal = at + _common_len(prompt, Rendered(rendered.text[at : span.first], rendered.plain))
        stop = stops.search(rendered.text, span.last + 1)
        if not before < equal or not span.last < behind or stop is None or stop.start() > behind:
            break
        at, done = stop.start(), turn.end
        turns.append(turn)
    used = set(entry.rendered.text[:done])
    strange = any(char in used and entry.rendered.plain.get(char) != text for char, text in rendered.plain.items())
    if not turns or strange:
        return rendered, ()
    text = entry.rendered.text[:done] + rendered.text[at:]
    return replace(rendered, text=text, plain={**entry.rendered.plain, **rendered.plain}, spans=[]), tuple(turns)


def _spells_control(pieces: Sequence[bytes], controls: Sequence[bool], template: ChatTemplate) -> bool:
    """Return whether the text between control tokens contains the string of one."""
    runs = groupby(zip(pieces, controls, strict=True), key=lambda pair: pair[1])
    texts = (b"".join(piece for piece, _ in run).decode("utf-8", "ignore") for control, run in runs if not control)
    return any(template.control.search(text) for text in texts)


def _common_len(one: Rendered, other: Rendered) -> int:
    """Return the number of leading characters that are equal and stand for the same strings."""
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


def _contains(entry: Prompt, other: Prompt) -> bool:
    """Return whether `entry` serves every prompt that `other` does."""
    return (
        entry.cache_namespace == other.cache_namespace
        and entry.ids[: len(other.ids)] == other.ids
        and entry.cuts.items() >= other.cuts.items()
        and set(entry.turns) >= set(other.turns)
    )


def _with_answer(prompt: Prompt, ids: list[int], pieces: Iterable[bytes]) -> Prompt:
    """Return a prompt with its answer, and a cut after each token that ends a character."""
    text, cuts, rest = prompt.rendered.text, dict(prompt.cuts), b""
    for count, piece in enumerate(pieces, len(prompt.ids) + 1):
        rest += piece
        try:
            text += rest.decode()
        except UnicodeDecodeError:
            continue
        rest = b""
        cuts[len(text)] = count
    return Prompt(prompt.ids + ids, Rendered(text, prompt.rendered.plain), cuts, prompt.cache_namespace, prompt.turns)


def _special_cuts(text: str, ids: list[int], template: ChatTemplate, tokenizer: Tokenizer) -> dict[int, int]:
    """Return the cuts before the special tokens of a text; none if its tokens and its special strings do not match."""
    names = {token: tokenizer.text_of(token) for token in set(ids) if token != PICTURE}
    special = {token for token, name in names.items() if name in template.special_strings}
    places = [index for index, token in enumerate(ids) if token in special]
    matches = list(template.specials.finditer(text))
    if len(places) == len(matches) + 1 and places[0] == 0 and ids[0] == tokenizer.bos_id:
        del places[0]  # a BOS that the model wants and the template does not write
    if len(places) != len(matches):
        return {}
    if any(names[ids[place]] != match[0] for place, match in zip(places, matches, strict=True)):
        return {}
    return {match.start(): place for place, match in zip(places, matches, strict=True) if place}
