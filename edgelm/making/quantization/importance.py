"""The importance of each column of each matrix: the mean square of the activations that it is multiplied with.

As llama.cpp's imatrix tool computes it, over windows of a text. Owns the run of the model over the text, and the cache
of its result, from which an interrupted run goes on. Runs in a worker: it loads native code.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import Batch, fill_struct, native_log
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.executor import LlamaOptions, context_params, yarn_ramp
from edgelm.backends.llama.graph_nodes import F32, GraphReader, Node, graph_reader
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import EdgeLMError, EngineError, ModelError, RequestError
from edgelm.base.kept_files import delete_older
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.checkpoints.files import file_identity
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.summary import kind_and_pooling
from edgelm.making.quantization.calibration_tokens import Chat, calibration_tokens
from edgelm.making.quantization.imatrix_file import Statistics, read_statistics, write_statistics
from edgelm.making.quantization.job import NUM_TOKENS

WINDOW = 512  # tokens, as of llama.cpp's tool
BATCH = 128  # tokens of a step: all have logits, which for 150,000 tokens take 77 MB
LEAST_TOKENS = 16
LEAST_WINDOWS = 8  # that a time limit leaves
BLOCK = "blk."  # begins the names of matrices of a layer
WORKSPACE_BYTES = 512 * 2**20  # compute buffers, the logits of a batch, vocabulary, Python
SAVE_EVERY_S = 30.0
MAX_AGE_S = 30 * 24 * 3600.0  # of a file in the cache
FORMAT = 1  # of the cache, and of the way the numbers are made: part of the key

log = logging.getLogger(__name__)


class NotMeasurableError(ModelError):
    """The model is no model of texts, or does not fit in memory: it can be quantized, without an importance matrix."""


Progress = Callable[[int, int], object]  # called with the windows that are done, and all


def measure(
    model: Path,
    text: str,
    *,
    chats: Sequence[Chat] = (),
    max_tokens: int = NUM_TOKENS,
    with_output: bool = False,
    cache: Path | None = None,
    threads: int = 0,
    repack: bool = True,
    limit_s: float | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Statistics:
    """Run a model over the first tokens of a text, and return the sums of the squares.

    `chats` are rendered by the model's template and take up to a quarter of the tokens. `with_output` adds the output
    matrix, or the embedding in its place: with these data llama.cpp quantizes it worse. With `cache`, a folder, the
    result is kept there, and an interrupted run goes on. `limit_s` ends it early, after some windows at least. Raises
    ModelError for a model that llama.cpp cannot run, that writes no text, or that does not fit in memory, and
    RequestError for a text that is too short.
    """
    with open_gguf(model) as gguf:
        _check(gguf)
        matrices = frozenset(
            name
            for name, tensor in gguf.tensors.items()
            if len(tensor.shape) >= 2 and (with_output or name.startswith(BLOCK))
        )
        files = gguf.paths
    kept = _Kept(cache, files, (text, list(chats), max_tokens, with_output)) if cache else None
    statistics = (kept and kept.load()) or Statistics(chunk_len=WINDOW)
    if kept and kept.complete(statistics):
        return statistics
    with ExitStack() as resources:
        native = LlamaModel(files[0], files=files, repack=repack)
        resources.callback(native.close)
        runner = _Runner(native, matrices, statistics, threads or usable_cores().physical)
        resources.callback(runner.close)
        tokenizer = LlamaTokenizer.of_model(native.native, native)
        windows = _windows(calibration_tokens(tokenizer, text, chats, max_tokens), tokenizer, runner.window)
        _run_windows(runner, statistics, windows, kept, limit_s, progress)
    return statistics


def _run_windows(
    runner: _Runner,
    statistics: Statistics,
    windows: Sequence[Sequence[int]],
    kept: _Kept | None,
    limit_s: float | None,
    progress: Progress,
) -> None:
    """Run the windows that are not in the statistics yet, and keep these from time to time and at the end."""
    saved_at = time.monotonic()
    progress(statistics.num_chunks, len(windows))
    ends_at = math.inf if limit_s is None else saved_at + limit_s
    for window in windows[statistics.num_chunks :]:
        if statistics.num_chunks >= LEAST_WINDOWS and time.monotonic() >= ends_at:
            break
        runner.run(window)
        statistics.num_chunks += 1
        progress(statistics.num_chunks, len(windows))
        if kept and time.monotonic() - saved_at > SAVE_EVERY_S:
            kept.save(statistics, len(windows))
            saved_at = time.monotonic()
    if kept:
        kept.save(statistics, len(windows))


def _check(gguf: GGUF) -> None:
    check_for_llama(gguf)
    if kind_and_pooling(gguf)[0] != "text":
        raise NotMeasurableError(f"{gguf.name} writes no text, so none shows which weights matter", "add --no-imatrix")
    needed, free = gguf.size + WORKSPACE_BYTES, available_memory_bytes()
    if needed > free:
        raise NotMeasurableError(
            f"{gguf.name} takes {needed / 2**30:.1f} GiB of memory to be run for its importance matrix, and "
            f"{free / 2**30:.1f} GiB are free",
            "close other programs, give an existing one with --imatrix, or add --no-imatrix",
        )


def _windows(tokens: list[int], tokenizer: LlamaTokenizer, length: int) -> list[list[int]]:
    """Cut tokens into windows of one length, each after a BOS if the model wants one."""
    bos = [token for token in tokenizer.encode("", special=False, bos=True) if token == tokenizer.bos_id]
    step = length - len(bos)
    windows = [bos + tokens[start : start + step] for start in range(0, len(tokens), step)]
    full = [window for window in windows if len(window) == length] or windows[:1]
    if not full or len(full[0]) < LEAST_TOKENS:
        raise RequestError(f"the text for calibration has {len(tokens)} tokens", "give one of some thousand words")
    return full


class _Runner:
    """A context that adds up the squares of all inputs of matrices, while windows run through it."""

    def __init__(self, model: LlamaModel, matrices: frozenset[str], statistics: Statistics, threads: int) -> None:
        self.window = min(WINDOW, model.train_context or WINDOW)
        self._collector = _Collector(graph_reader(), matrices, statistics)
        self._callback = _CALLBACK(self._collector.visit)
        options = LlamaOptions(context=self.window, max_sequences=1, max_tokens=BATCH, max_rows=BATCH, threads=threads)
        params = fill_struct(
            context_params(options, model.num_heads),
            type_k=F32,
            type_v=F32,
            cb_eval=ctypes.cast(self._callback, type(L.llama_context_default_params().cb_eval)),
            **yarn_ramp(model),
        )
        native_log.clear()
        self._context: Any = L.llama_init_from_model(model.native, params)
        if not self._context:
            raise ModelError(f"llama.cpp could not make a context: {native_log.first_error() or 'it gives no reason'}")
        self._memory = L.llama_get_memory(self._context)
        self._batch = Batch(BATCH)

    def run(self, window: Sequence[int]) -> None:
        """Run a window. All its tokens have logits: otherwise the last layer's matrices see only those that have."""
        if self._memory:
            L.llama_memory_clear(self._memory, True)
        for start in range(0, len(window), BATCH):
            tokens = list(window[start : start + BATCH])
            self._batch.native.n_tokens = self._batch.set(0, tokens, start, 0, len(tokens))
            native_log.clear()
            self._collector.begin()
            result = L.llama_decode(self._context, self._batch.native)
            self._collector.end()
            if result != 0:
                raise EngineError(f"llama.cpp could not run the text ({result}): {native_log.first_error()}")

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            L.llama_free(context)


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class _Errors:
    """Keeps the first error of the blocks that it is around, and lets none pass."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.first = self.first or error
        return True


class _Collector:
    """The callback of the graph: it asks to see each product of one of the matrices, and adds up its input."""

    def __init__(self, reader: GraphReader, matrices: frozenset[str], statistics: Statistics) -> None:
        self._reader = reader
        self._matrices = matrices
        self._statistics = statistics
        self._errors = _Errors()
        self._last: tuple[int, NDArray[np.float64]] | None = None  # the address of an input, and its sums

    def begin(self) -> None:
        self._last = None

    def end(self) -> None:
        """Raise the error of the last step: ctypes drops those of a callback."""
        if self._errors.first:
            raise self._errors.first

    def visit(self, address: int, ask: bool, _: object) -> bool:
        """Return whether a node is to be seen (`ask`), or see it and return whether to go on."""
        with self._errors:
            node = Node.from_address(address)
            if ask:
                return self._concerns(node)
            if node.op == self._reader.mul_mat_id:
                self._add_experts(node)
            else:
                self._add(node)
        return self._errors.first is None

    def _concerns(self, node: Node) -> bool:
        if self._errors.first or node.op not in (self._reader.mul_mat, self._reader.mul_mat_id):
            return False
        return node.source(1).type == F32 and node.source(0).name in self._matrices

    def _add(self, node: Node) -> None:
        matrix = node.source(0)
        inner, outer = matrix.sizes[2], matrix.sizes[3]
        if inner * outer == 1:
            address = node.sources[1]
            values = self._reader.values(node.source(1))
            if self._last is None or self._last[0] != address:  # query, key and value have the same input
                self._last = address, _squares(values.reshape(-1, values.shape[-1]))
            self._statistics.add(matrix.name, 1, 0, self._last[1], values.size // values.shape[-1])
            return
        values = self._reader.values(node.source(1))
        for third in range(values.shape[0]):
            for second in range(values.shape[1]):
                index = third % outer * inner + second % inner
                rows = values[third, second]
                self._statistics.add(matrix.name, inner * outer, index, _squares(rows), len(rows))

    def _add_experts(self, node: Node) -> None:
        matrix = node.source(0)
        inputs = self._reader.values(node.source(1))[0]  # [tokens, experts used or 1, columns]
        ids = self._reader.values(node.source(2))[0, 0]  # [tokens, experts used]
        tokens, slots = np.indices(ids.shape)
        for expert in np.unique(ids):
            taken = ids == expert
            rows = inputs[tokens[taken], slots[taken] % inputs.shape[1]]
            self._statistics.add(matrix.name, matrix.sizes[2], int(expert), _squares(rows), len(rows))


def _squares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sum of squares of each column. Raises ModelError where it is no number."""
    sums: NDArray[np.float64] = np.einsum("ij,ij->j", rows, rows).astype(np.float64)
    if not np.isfinite(sums).all():
        raise ModelError("the model computes values that are no numbers", "check the model's file, or add --no-imatrix")
    return sums


class _Kept:
    """The file in the cache with the result for one model, text and number of tokens."""

    def __init__(self, folder: Path, files: Sequence[Path], key: tuple[object, ...]) -> None:
        digest = hashlib.blake2b(repr((FORMAT, WINDOW, key)).encode("utf-8", "surrogatepass"), digest_size=16)
        try:
            for part in file_identity(files):
                digest.update(part)
        except OSError as error:
            raise ModelError(f"{files[0].name} cannot be read: {error.strerror}") from None
        self._path = folder / f"{digest.hexdigest()}.gguf"
        delete_older(folder, MAX_AGE_S, "*.gguf")

    def load(self) -> Statistics | None:
        """Return the sums so far; None: there are none."""
        if not self._path.exists():
            return None
        try:
            return read_statistics(self._path)
        except RequestError:
            return None

    def complete(self, statistics: Statistics) -> bool:
        """Whether all windows are done: their number is kept as the name of the text."""
        return bool(statistics.texts) and statistics.texts[-1] == str(statistics.num_chunks)

    def save(self, statistics: Statistics, total: int) -> None:
        """Keep the sums. A cache that cannot be written is ignored."""
        statistics.texts = (str(total),)
        with suppress(EdgeLMError):
            write_statistics(statistics, self._path)
