"""How far a changed model is from itself before the change: the mean KL divergence of its predictions on a text.

Owns the tokens of the text, and the logits of the unchanged model, which lie in a file: those of a large vocabulary
take gigabytes. Knows nothing of what is changed.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.evaluation import load_llama_evaluation
from edgelm.base.disk import require_space
from edgelm.base.errors import RequestError
from edgelm.base.workers.messages import EvalSide
from edgelm.evaluation.evaluate import window_logits
from edgelm.evaluation.scores import Logits, score
from edgelm.evaluation.text import Window
from edgelm.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 64  # of a window, that are not scored: the first predictions are hardly more than frequencies
LEAST_WINDOW = 128  # tokens
LEAST_TOKENS = 32  # of a text
CHARS_PER_TOKEN = 16  # at most, on average


class Cut(Protocol):
    """The windows on which models are compared, of at most `window` tokens; None: the usual number."""

    window: int | None

    @property
    def key(self) -> str:
        """All that the windows depend on beside the model."""

    def windows(self, tokenizer: Tokenizer, length: int) -> list[Window]:
        """Return windows of at most `length` tokens."""
        ...


class TextCut:
    """Windows from all over a text, together of about `num_tokens` tokens if it has them."""

    def __init__(self, text: str, num_tokens: int) -> None:
        self.window: int | None = None
        self._text = text
        self._num_tokens = num_tokens

    @property
    def key(self) -> str:
        digest = hashlib.sha256(self._text.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{digest} {self._num_tokens}"

    def windows(self, tokenizer: Tokenizer, length: int) -> list[Window]:
        """Return windows of at most `length` tokens. Raises RequestError for a text that is too short."""
        text = self._text
        start = [token for token in tokenizer.encode("", special=False, bos=True) if token == tokenizer.bos_id]
        head = _encoded(tokenizer, text[: self._num_tokens * CHARS_PER_TOKEN])
        num_windows = max(1, min(-(-self._num_tokens // length), len(head) // LEAST_WINDOW))
        part = -(-len(text) // num_windows)
        excerpts = [text[first : first + min(part, length * CHARS_PER_TOKEN)] for first in range(0, len(text), part)]
        windows = [[*start, *_encoded(tokenizer, excerpt)][:length] for excerpt in excerpts]
        windows = [tokens for tokens in windows if len(tokens) >= LEAST_TOKENS]
        if not windows:
            raise RequestError(f"the text has {len(head):,} tokens", "give a text of some thousand words")
        return [Window(tokens, min(CONTEXT_TOKENS, len(tokens) // 2)) for tokens in windows]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=False, bos=False, unknown=True)


class DivergenceMeter:
    """A model that llama.cpp maps, beside the logits that it had when this was made. A context manager.

    The weights stay in the file, so that a change of the file is a change of the model.
    """

    def __init__(self, model: Path, cut: Cut, *, threads: int) -> None:
        with ExitStack() as resources:
            side = EvalSide(model, "f16")
            evaluation = load_llama_evaluation(side, None, window=cut.window, threads=threads, repack=False)
            resources.enter_context(evaluation)
            self._executor = evaluation.model.executor
            self._windows = cut.windows(evaluation.tokenizer, evaluation.window)
            self.num_tokens = sum(len(window.tokens) - window.first for window in self._windows)  # that are scored
            require_space(model.parent, 4 * self.num_tokens * self._num_vocab, "the predictions of the model")
            file = resources.enter_context(tempfile.TemporaryFile(dir=model.parent))
            self._reference = _LogitsFile(file, self._num_vocab)
            for logits, _ in self._run():
                self._reference.append(logits)
            self._resources = resources.pop_all()

    def measure(self) -> float:
        """Return the mean KL divergence from the unchanged model, in nats a token."""
        row, total = 0, 0.0
        for logits, targets in self._run():
            reference = self._reference.rows(row, row + len(targets))
            total += float(score(logits, targets, reference).divergence.sum())
            row += len(targets)
        return total / row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def _num_vocab(self) -> int:
        return self._executor.info.num_vocab

    def _run(self) -> Iterator[tuple[Logits, NDArray[np.int64]]]:
        for window in self._windows:
            yield from window_logits(self._executor, window)


class _LogitsFile:
    """Logits in a file without a name, which ends with this process: [rows, vocab]."""

    def __init__(self, file: IO[bytes], num_vocab: int) -> None:
        self._file = file
        self._num_vocab = num_vocab

    def append(self, logits: Logits) -> None:
        self._file.write(np.ascontiguousarray(logits).data)

    def rows(self, start: int, end: int) -> Logits:
        self._file.seek(4 * start * self._num_vocab)
        data = self._file.read(4 * (end - start) * self._num_vocab)
        return np.frombuffer(data, np.float32).reshape(-1, self._num_vocab)
