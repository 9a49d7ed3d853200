"""The index of knowledge: passages in one SQLite file, found by their words and by vectors.

Owns what is indexed again, what is forgotten, and the ranking: FTS5's BM25, and with vectors reciprocal rank fusion
(Cormack, Clarke and Buettcher, SIGIR 2009). The file is a cache: a damaged one is made again. Knows nothing of models
and screens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edgelm.base.errors import EdgeLMError
from edgelm.base.passages import SEPARATOR, Passage
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.knowledge.files import LeftOut, Root, real_root
from edgelm.chats.knowledge.guide import Page, searchable_pages
from edgelm.chats.knowledge.passages import split_text
from edgelm.chats.knowledge.question import MAX_QUESTION, query
from edgelm.chats.knowledge.quote import fitting
from edgelm.chats.knowledge.tables import Database, KnownFile, NewPassage, Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEPT_DAYS = 30  # a root that is not used for so long is forgotten
NUM_CANDIDATES = 50  # of each ranking
RANK_OFFSET = 60  # of the fusion: how little the first places differ; the paper's value
SOURCE_WEIGHT, HEADING_WEIGHT, TEXT_WEIGHT, ASKED_WEIGHT = 2.0, 3.0, 1.0, 1.0  # of a word, by where it stands
LEAST_SHARE = 0.3  # of the best score by words; a passage below it answers something else ...
NUM_ANYWAY = 3  # ... but these many stay: in few passages no word is rare
BATCH_BYTES = 2**20  # of text that is read between two writes: others may write in between
EMBEDDED_AT_ONCE = 32  # passages

Guide = Callable[[], Iterable[Page]]


class Embed(Protocol):
    """A function that returns unit vectors, [texts, width]. `model` names the space that they can be compared in."""

    @property
    def model(self) -> str: ...

    def __call__(self, texts: Sequence[str], /) -> NDArray[np.float32]: ...


class Refreshed(NamedTuple):
    """The state of the roots after they were read again."""

    num_files: int
    num_passages: int
    num_changed: int  # files that were new, changed or gone
    left_out: tuple[LeftOut, ...]


class _Change(NamedTuple):
    """A file or a topic that is not as it was. `passages` is None if only its times changed."""

    name: str
    known: KnownFile
    reason: str = ""
    passages: Sequence[Passage] | None = ()
    asked: Mapping[str, str] = {}  # questions by the heading of the passages that answer them


class Knowledge:
    """The passages of all roots, in one file. Only one thread may use it at a time; two processes may have it open.

    `guide` gives the pages of the root GUIDE; None: those of the built-in guide. Every method raises EdgeLMError, for a
    full disk and for a file that another program has locked, too.
    """

    def __init__(self, file: Path, guide: Guide | None = None) -> None:
        self._database = Database(file)
        self._guide = guide or searchable_pages

    def close(self) -> None:
        self._database.close()

    # -- indexing ------------------------------------------------------------------------------------------------------

    def refresh(self, roots: Sequence[str]) -> Refreshed:
        """Index new and changed files of the roots, and forget those that are gone.

        A file is read again if its size or one of its times changed, and indexed again if its content did. Raises
        EdgeLMError if a root does not exist (it is forgotten), or is a file that cannot be knowledge.
        """
        return self._database.retried(lambda: self._refresh(_keys(roots)))

    def _refresh(self, keys: dict[str, str]) -> Refreshed:
        with self._database.transaction():
            self._database.forget_unused(time.time() - KEPT_DAYS * 86_400)
        num_changed = 0
        left_out: list[LeftOut] = []
        for key, named in keys.items():
            num_changed += self._refresh_guide() if key == GUIDE else self._refresh_root(key, named, left_out)
        if num_changed:
            with self._database.transaction():
                self._database.prune()
        num_files, num_passages = self._database.count(list(keys))
        return Refreshed(num_files, num_passages, num_changed, tuple(left_out))

    def _refresh_guide(self) -> int:
        pages = {page.topic: page for page in self._guide()}
        with self._database.transaction():
            root = self._database.root(GUIDE)
            known = self._database.files(root)
            changes = [
                _Change(
                    topic,
                    KnownFile("", _page_digest(page)),
                    "",
                    split_text(topic, page.text, markdown=True),
                    page.asked,
                )
                for topic, page in pages.items()
                if topic not in known or known[topic].digest != _page_digest(page)
            ]
            self._write(root, changes)
            gone = known.keys() - pages.keys()
            self._database.remove(root, gone)
        return len(changes) + len(gone)

    def _refresh_root(self, key: str, named: str, left_out: list[LeftOut]) -> int:
        try:
            opened = Root(named)
        except EdgeLMError:
            with self._database.transaction():
                self._database.forget_root(key)
            raise
        with closing(opened):
            with self._database.transaction():
                root = self._database.root(key)
            known = self._database.files(root)
            seen: set[str] = set()
            num_changed = 0
            for changes in _changes(opened, known, seen):
                with self._database.transaction():
                    root = self._database.root(key)  # another process may have forgotten it, and its id is given again
                    self._write(root, changes)
                num_changed += sum(change.passages is not None for change in changes)
            gone = known.keys() - seen
            with self._database.transaction():
                root = self._database.root(key)
                self._database.remove(root, gone)
            for name, reason in self._database.left_out(root):
                opened.leave_out(name, reason)
            left_out += opened.left_out
            if opened.is_file and opened.left_out:
                reason = opened.left_out[0].reason
                raise EdgeLMError(f"{named} cannot be knowledge: {reason}", "name another file, or a folder")
            return num_changed + len(gone)

    def _write(self, root: int, changes: Iterable[_Change]) -> None:
        for name, known, reason, passages, asked in changes:
            if passages is None:
                self._database.stamp(root, name, known.stamp)
                continue
            title = passages[0].heading.split(SEPARATOR)[0] if passages else ""
            new = [
                NewPassage(f"{name} {title}", p.heading, p.text, _digest(_embedded(p)), asked.get(p.heading, ""))
                for p in passages
            ]
            self._database.put(root, name, known, reason, new)

    def embed(self, roots: Sequence[str], embed: Embed, *, at_most: int = EMBEDDED_AT_ONCE) -> int:
        """Compute vectors of passages that have none yet; return how many were computed, 0: all are there.

        A search embeds only the passages that it finds by their words: call this in idle moments, until it returns 0.
        """
        keys = list(_keys(roots))
        return self._database.retried(
            lambda: self._embed_rows(self._database.unembedded(keys, embed.model, at_most), embed)
        )

    def _embed_rows(self, rows: Sequence[Row], embed: Embed) -> int:
        if rows:
            vectors = embed([_embedded(_passage(row)) for row in rows])
            with self._database.transaction():
                self._database.forget_vectors(embed.model, 2 * vectors.shape[1])
                pairs = zip(rows, vectors, strict=True)
                self._database.put_vectors(embed.model, [(row.digest, _stored(vector)) for row, vector in pairs])
        return len(rows)

    # -- searching -----------------------------------------------------------------------------------------------------

    def search(
        self, roots: Sequence[str], question: str, *, max_chars: int, embed: Embed | None = None
    ) -> list[Passage]:
        """Return the passages of refreshed roots that fit a question, best first, of at most `max_chars` together.

        With `embed`, its ranking counts as much as that by words; what `embed` raises passes through.
        """
        keys = _keys(roots)
        return self._database.retried(
            lambda: self._search(list(keys), question, max_chars, embed), lambda: self._refresh(keys)
        )

    def _search(self, keys: list[str], question: str, max_chars: int, embed: Embed | None) -> list[Passage]:
        if not keys or not question.strip():
            return []
        ranked = self._by_words(keys, question)
        if embed is None:
            least = LEAST_SHARE * ranked[0][1] if ranked else 0.0
            ids = [passage for place, (passage, score) in enumerate(ranked) if place < NUM_ANYWAY or score >= least]
        else:
            words = [passage for passage, _ in ranked]
            ids = fused(words, self._by_vectors(keys, question, words, embed))[:NUM_CANDIDATES]
        found = map(_passage, self._database.rows(ids))
        once: dict[tuple[str, str], Passage] = {}  # two roots may hold the same file
        for passage in found:
            once.setdefault((passage.heading, passage.text), passage)
        return fitting(once.values(), max_chars)

    def _by_words(self, keys: list[str], question: str) -> list[tuple[int, float]]:
        asked = query(question, self._database)
        weights = (SOURCE_WEIGHT, HEADING_WEIGHT, TEXT_WEIGHT, ASKED_WEIGHT)
        return self._database.ranked(keys, asked, weights, NUM_CANDIDATES) if asked else []

    def _by_vectors(self, keys: list[str], question: str, words: list[int], embed: Embed) -> list[int]:
        import numpy as np  # here: most searches need no vectors

        asked = embed([question[:MAX_QUESTION]])[0]
        known = {passage for passage, _ in self._database.vectors(keys, embed.model, 2 * len(asked))}
        missing = [passage for passage in words[:EMBEDDED_AT_ONCE] if passage not in known]
        self._embed_rows(self._database.rows(missing), embed)
        stored = self._database.vectors(keys, embed.model, 2 * len(asked))
        if not stored:
            return []
        data = b"".join(vector for _, vector in stored)
        matrix = np.frombuffer(data, np.float16).reshape(len(stored), -1)  # [passages, width]
        scores = np.nan_to_num(matrix.astype(np.float32) @ asked)
        return [stored[i][0] for i in np.argsort(-scores, kind="stable")[:NUM_CANDIDATES]]


def fused(*rankings: Sequence[int]) -> list[int]:
    """Return what several rankings name, best first, by reciprocal rank fusion: the sum of 1 / (60 + place).

    Cormack, Clarke and Buettcher: Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods,
    SIGIR 2009.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for place, passage in enumerate(ranking, 1):
            scores[passage] = scores.get(passage, 0.0) + 1 / (RANK_OFFSET + place)
    return sorted(scores, key=lambda passage: -scores[passage])


def _changes(opened: Root, known: dict[str, KnownFile], seen: set[str]) -> Iterator[list[_Change]]:
    """Yield what changed in batches, and add the names of all files to `seen`."""
    batch: list[_Change] = []
    num_bytes = 0
    for file in opened.files():
        before = known.get(file.name)
        if before and file.stamp and before.stamp == file.stamp:
            seen.add(file.name)
            continue
        content = opened.read(file)
        if content is None:
            continue
        seen.add(file.name)
        now = KnownFile(content.stamp, _digest(content.reason + "\0" + content.text))
        if before and before.digest == now.digest:
            if before.stamp != now.stamp:
                batch.append(_Change(file.name, now, passages=None))
        else:
            batch.append(_Change(file.name, now, content.reason, split_text(file.name, content.text)))
        num_bytes += len(content.text)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _keys(roots: Sequence[str]) -> dict[str, str]:
    """Return each root once: as the index names it, and as the user does."""
    return {GUIDE if root == GUIDE else real_root(root): root for root in roots}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _page_digest(page: Page) -> bytes:
    return _digest("\0".join([page.text, *chain.from_iterable(page.asked.items())]))


def _passage(row: Row) -> Passage:
    return Passage(row.source, row.heading, row.text)


def _embedded(passage: Passage) -> str:
    """Return what a passage's vector is computed from."""
    return f"{passage.name}\n\n{passage.text}"


def _stored(vector: NDArray[np.float32]) -> bytes:
    return vector.astype("float16").tobytes()
