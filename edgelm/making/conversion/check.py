"""The check of a GGUF before it gets its name: its logits against those of the folder, or its tensors read back.

Owns what is compared, how much may differ, and when a comparison is too large for this machine. The folder's own
forward pass is in folder_pass.py, which needs torch; a plain installation reads the tensors back instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.embedding import embedder_of
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import DoesNotFitError, ModelError, RequestError
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.checkpoints.encoder import EncoderConfig
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.summary import model_facts
from edgelm.evaluation.evaluate import run_tokens
from edgelm.making.conversion.convert import Source
from edgelm.making.conversion.layout import target_family
from edgelm.making.conversion.number_types import Kind

MAX_BYTES = 2**35  # of a model whose logits are compared: larger ones take minutes
SPARE_BYTES = 2**30  # of memory, beside the model
NUM_TOKENS = 48
CONTEXT = 256  # the shortest of llama.cpp
# the median over the tokens of the error relative to the logits, which a wrongly placed row brings to about 1
MAX_ERROR, MAX_ERROR_8_BIT = 0.1, 0.25
HINT = "the file was deleted; please report the model's name"
PROBE = (
    "The quick brown fox jumps over the lazy dog. In 1969, three people flew to the moon and back: it took 8 days.\n"
    "def area(radius):\n    return 3.14159 * radius ** 2\n"
)


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    """How far the logits of the GGUF in llama.cpp are from those of the folder in torch."""

    tokens: int
    mean_kl: float
    max_kl: float
    max_difference: float  # of a logit, without what is common to a row
    median_error: float  # of a row, relative to the folder's logits
    same_top: int  # tokens with the same most likely next one


@dataclass(frozen=True, slots=True)
class Outcome:
    """The method of a check, and its figures."""

    method: str  # "logits", "tensors" or "none"
    detail: dict[str, Any]
    reason: str = ""  # why logits were not compared
    notes: tuple[str, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        return {"method": self.method, **self.detail, "reason": self.reason or None}


def check_gguf(source: Source, part: Path, *, threads: int, stage: Callable[[str], None]) -> Outcome:
    """Check an unfinished GGUF against its folder. Raises ModelError where it is wrong."""
    with open_gguf(part) as gguf:
        check_for_llama(gguf)
    if reason := _why_not_compared(source):
        return _check_tensors(source, part, reason, threads=threads, stage=stage)
    from edgelm.making.conversion.folder_pass import folder_logits, tokenizer_notes

    stage("computing logits with llama.cpp")
    with _Llama(part, threads) as llama:
        tokens = llama.probe(_num_tokens(source))
        logits = llama.logits(tokens)
        differing = tokenizer_notes(source, llama.tokenizer)
    _require_finite(logits)
    stage("computing the folder's logits with torch")
    try:
        reference = folder_logits(source, tokens, CONTEXT, threads)
    except DoesNotFitError:
        return _check_tensors(source, part, _too_large(source), threads=threads, stage=stage)
    compared = compare(logits, reference)
    limit = MAX_ERROR_8_BIT if any(tensor.kind == Kind.Q8_0 for tensor in source.layout.tensors) else MAX_ERROR
    if not compared.median_error <= limit:
        error = f"relative error {compared.median_error:.2g}"
        raise ModelError(f"the converted file computes other logits than the folder ({error})", HINT)
    return Outcome("logits", asdict(compared), notes=tuple(differing))


def _check_tensors(source: Source, part: Path, reason: str, *, threads: int, stage: Callable[[str], None]) -> Outcome:
    """Read the tensors back, and see whether llama.cpp computes numbers. Raises ModelError."""
    stage("reading the tensors back")
    with open_gguf(part) as gguf:
        detail: dict[str, Any] = {"tensors": len(source.layout.tensors), "bytes": _read_back(source, gguf)}
    if detail["bytes"] > available_memory_bytes():
        return Outcome("tensors", detail, f"{reason}; llama.cpp did not load it: it is larger than the memory")
    stage("loading it with llama.cpp")
    if isinstance(source.config, EncoderConfig):
        _require_finite(_vector(part, threads))
        return Outcome("tensors", detail, reason)
    with _Llama(part, threads) as llama:
        _require_finite(llama.logits(llama.probe(_num_tokens(source))))
    return Outcome("tensors", detail, reason)


def compare(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> LogitsCheck:
    """Compare logits [tokens, vocabulary] with those of the folder."""
    got, want = (rows.astype(np.float64) for rows in (logits, reference))
    got, want = got - got.mean(1, keepdims=True), want - want.mean(1, keepdims=True)
    difference = got - want
    errors = np.linalg.norm(difference, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-9)
    log_p, log_q = _log_softmax(want), _log_softmax(got)
    divergence = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(1), 0.0)
    return LogitsCheck(
        tokens=len(got),
        mean_kl=float(divergence.mean()),
        max_kl=float(divergence.max()),
        max_difference=float(np.abs(difference).max()),
        median_error=float(np.median(errors)),
        same_top=int((got.argmax(1) == want.argmax(1)).sum()),
    )


def _why_not_compared(source: Source) -> str:
    """Return why logits are not compared; empty: they are."""
    if isinstance(source.config, EncoderConfig):
        return "a BERT has no logits"
    if find_spec("torch") is None:
        return "torch is not installed, so logits were not compared"
    size = max(source.reader.model.size, sum(tensor.nbytes for tensor in source.layout.tensors))
    return _too_large(source) if size > min(available_memory_bytes() - SPARE_BYTES, MAX_BYTES) else ""


def _too_large(source: Source) -> str:
    return f"the model is too large to compare logits here ({source.reader.model.size / 2**30:.1f} GiB)"


def _num_tokens(source: Source) -> int:
    """Return how many tokens are compared: no more than a window that llama.cpp does not have."""
    limits = [NUM_TOKENS, source.config.context]
    if not isinstance(source.config, EncoderConfig) and not target_family(source.config).gguf_window:
        limits += [layer.window for layer in source.config.layers if layer.window]
    return min(limits)


def _read_back(source: Source, gguf: GGUF) -> int:
    """Compare the bytes of each tensor with those that the folder's give, and return their number."""
    total = 0
    for tensor in source.layout.tensors:
        stored = np.frombuffer(gguf.tensor_bytes(tensor.name), np.uint8)
        at = 0
        for piece in tensor.content.pieces(source.reader, tensor.kind):
            if not np.array_equal(stored[at : at + piece.nbytes], piece):
                raise ModelError(f"tensor {tensor.name} on the disk is not what was written", "check the disk")
            at += piece.nbytes
        total += at
    return total


def _require_finite(logits: NDArray[np.float32]) -> None:
    if not np.isfinite(logits).all():
        raise ModelError("the converted file computes no finite numbers", f"{HINT}, or try --to BF16")


def _log_softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = rows - rows.max(1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def _loaded(path: Path) -> LlamaModel:
    """Load a converted file. Raises ModelError."""
    try:
        return LlamaModel(path, repack=False)
    except ModelError as error:
        reason = error.message.partition("cannot be loaded: ")[2] or error.message
        raise ModelError(f"llama.cpp does not load the converted file: {reason}", HINT) from None


def _vector(path: Path, threads: int) -> NDArray[np.float32]:
    """Return the vector of a text by a BERT in llama.cpp. Raises ModelError."""
    with open_gguf(path) as gguf:
        facts = model_facts(gguf)
    model = _loaded(path)
    embedder = embedder_of(model, facts, min(CONTEXT, facts.summary.context), threads)
    try:
        tokens = LlamaTokenizer.of_model(model.native, model).encode(PROBE, special=False, bos=True, unknown=True)
        batch = embedder.begin([tokens[: min(NUM_TOKENS, facts.summary.context)]])
        while batch.step(NUM_TOKENS):
            pass
        return batch.vectors()
    finally:
        embedder.close()
        model.close()


class _Llama:
    """A GGUF in llama.cpp, on the processor."""

    def __init__(self, path: Path, threads: int) -> None:
        self._model = _loaded(path)
        self.tokenizer = LlamaTokenizer.of_model(self._model.native, self._model)
        options = LlamaOptions(context=CONTEXT, max_sequences=1, max_rows=NUM_TOKENS, threads=threads)
        self._executor = LlamaExecutor(self._model, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()

    def probe(self, count: int) -> list[int]:
        """Return the tokens that are compared: a text, or any ids where the vocabulary cannot write it."""
        try:
            tokens = self.tokenizer.encode(PROBE, special=False, bos=True)
        except RequestError:
            tokens = []
        size = self.tokenizer.num_tokens
        tokens += [(7919 * i + 13) % size for i in range(count - len(tokens))]
        return tokens[:count]

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return run_tokens(self._executor, tokens)
