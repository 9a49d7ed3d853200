"""The executor of our own kernels: paged KV in tensors, on a GPU through Triton, on the CPU by the reference ops.

Owns the weights, the KV memory and the device. Everything of a step is data: block tables, positions, rows. On a GPU
`forward` returns while the device works, and `sample` waits for the sampled tokens alone. Knows nothing of scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.core import (
    LAST,
    NOT_A_TOKEN,
    Chunk,
    ExecutorInfo,
    Masks,
    Ready,
    Sampled,
    Samples,
    SamplingParams,
    Sequence,
    Step,
)
from edgelm.errors import EngineError
from edgelm.executors.batch import LastTokens, StepBuffers, StepTensors, bucket_of
from edgelm.executors.graphs import SIZES, Graphs
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, KVFormat, LayerCache, allocate
from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.target import target_of
from edgelm.kernels.tuning import TABLE
from edgelm.models.decoder import Decoder
from edgelm.sampling.chunks import Histories, HostSampler, accepted_rows, first_position
from edgelm.sampling.device import DeviceSampler, Launch, RowRequest

MAX_ROWS = 64  # sampled rows of a step
MORE_ROWS = 24  # than decoding and verifying one sequence has


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """How an executor is made. `capacity` positions are shared by all sequences, a multiple of BLOCK_LEN."""

    context: int
    capacity: int
    kv: str = "f16"
    max_sequences: int = 8
    max_tokens: int = 512
    max_rows: int = MAX_ROWS
    graphs: bool = True
    runs_ahead: bool | None = None  # None: on a GPU, where a step that is dropped costs less than a wait
    tuned: Path | None = None  # where `edgelm.kernels.bench --tune` keeps the fastest configurations of this GPU


class OutOfMemoryError(EngineError):
    """The device has less memory than was asked for."""


class TorchExecutor:
    """An `Executor` over a decoder, which it takes over.

    Raises OutOfMemoryError where its memory cannot be had; what it had is free again then, but for the decoder's.
    """

    def __init__(self, decoder: Decoder, options: TorchOptions) -> None:
        assert options.capacity % BLOCK_LEN == 0
        assert options.context <= options.capacity
        config, device = decoder.config, decoder.device
        num_layers = len(config.layers)
        cache_format = FORMATS[options.kv]
        self._decoder: Decoder | None = decoder
        self._device = device
        self._info = ExecutorInfo(
            engine="torch",
            device=device_name(device),
            num_vocab=decoder.vocab_size,
            context=options.context,
            capacity=options.capacity,
            max_tokens=options.max_tokens,
            max_rows=options.max_rows,
            max_sequences=options.max_sequences,
            block_len=BLOCK_LEN,
            runs_ahead=device.type == "cuda" if options.runs_ahead is None else options.runs_ahead,
            kv_bytes_per_token=num_layers * cache_format.bytes_per_token(config.kv_heads, config.head_dim),
        )
        self._hidden = torch.empty((0, config.width))
        self._logits = torch.empty((0, decoder.vocab_size))
        self._host_sampler = HostSampler(decoder.vocab_size)
        self._device_sampler: DeviceSampler | None = None
        self._histories = Histories()
        self._last: LastTokens | None = None
        self._caches: list[LayerCache] = []
        self._buffers: StepBuffers | None = None
        self._graphs: Graphs | None = None
        try:
            self._allocate(decoder, options, cache_format)
        except BaseException:
            self.close()  # here: the error holds on to this object as long as somebody handles it
            raise

    def _allocate(self, decoder: Decoder, options: TorchOptions, cache_format: KVFormat) -> None:
        config, device = decoder.config, decoder.device
        num_blocks = options.capacity // BLOCK_LEN
        with _gpu_errors():
            for _ in config.layers:
                self._caches.append(
                    allocate(cache_format, num_blocks, config.kv_heads, config.head_dim, device, torch.float16)
                )
            self._buffers = StepBuffers(
                max_tokens=options.max_tokens,
                max_sequences=options.max_sequences,
                max_rows=max(options.max_rows, SIZES[-1]),  # a bucket has as many rows as tokens
                max_blocks=-(-options.context // BLOCK_LEN),
                block_len=BLOCK_LEN,
                device=device,
            )
            if device.type == "cuda":
                if options.tuned is not None:
                    TABLE.open(options.tuned, target_of(device))
                self._device_sampler = DeviceSampler(decoder.vocab_size, max(options.max_rows, SIZES[-1]), device)
        if options.graphs and device.type == "cuda":
            with _gpu_errors("--no-graphs runs without CUDA graphs"), torch.inference_mode():
                graphs = Graphs(options.max_sequences, options.max_tokens)
                graphs.capture(self._run, self._buffers)
                for logits in graphs.logits:
                    if self._device_sampler:
                        self._device_sampler.capture(logits, graphs.record)
                self._graphs = graphs
        if device.type == "cuda":
            self._warm_up(options)

    def _warm_up(self, options: TorchOptions) -> None:
        """Run a step of each kind: kernels are compiled, and scratch is had, before anybody waits for an answer."""
        everything = SamplingParams(repetition_penalty=1.1, logit_bias=((0, 0.0),), num_logprobs=1)
        seq = Sequence(-1, [0], 1, everything)
        most = min(options.max_tokens, options.context)
        prompts = [(0, most), (0, min(MORE_ROWS, most)), (0, min(8 * MORE_ROWS, most))]
        prompts.append((options.context - min(MORE_ROWS, most), min(MORE_ROWS, most)))  # behind a long context
        steps = [Step((_dummy(seq, *prompt),)) for prompt in prompts]
        several = min(options.max_sequences, MORE_ROWS)
        rows = min(options.max_tokens, options.max_rows, MORE_ROWS) // several
        steps.append(Step((_dummy(seq, 0, rows, rows),) * several))
        for step in steps:
            self.forward(step)
            self.sample(step, None).read()

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def forward(self, step: Step) -> None:
        """Run the chunks. Raises EngineError when the device has no memory left, or fails."""
        assert not step.ops
        if not step.chunks:
            return
        self._check(step)
        assert self._buffers is not None, "the executor is closed"
        size = bucket_of(step)
        bucket = self._graphs.bucket(size) if self._graphs else None
        with _gpu_errors(), torch.inference_mode():
            self._buffers.fill(step, bucket or size, self._last)
            if bucket and self._graphs:
                self._hidden, self._logits = self._graphs.replay(bucket)
            else:
                self._hidden, self._logits = self._run(self._buffers.views(size))

    def sample(self, step: Step, masks: Masks | None) -> Samples:
        """Start to sample the rows of each chunk, up to the first that differs from the draft. Raises EngineError."""
        if not step.num_rows:
            return Ready([[] for _ in step.chunks])
        row_of = _last_rows(step)
        if self._device_sampler is None:
            sampled = self._host_sampler.sample(step, self.logits(step), masks)
            tokens = [NOT_A_TOKEN] * step.num_rows
            for chunk, rows in zip(step.chunks, sampled, strict=True):
                if chunk.seq.id in row_of:
                    tokens[row_of[chunk.seq.id]] = rows[0].id
            self._last = LastTokens(torch.tensor(tokens), row_of)
            return Ready(sampled)
        with _gpu_errors(), torch.inference_mode():
            launch = self._device_sampler.launch(self._logits[: step.num_rows], self._requests(step), masks)
        self._last = LastTokens(launch.tokens, row_of)
        return _Launched(step, launch)

    def logits(self, step: Step) -> NDArray[np.float32]:
        """Return the logits of the sampled rows, valid until the next `forward`: [rows, vocabulary]."""
        with _gpu_errors():
            logits: NDArray[np.float32] = self._logits[: step.num_rows].float().cpu().numpy()
        return logits

    def embed(self, step: Step) -> NDArray[np.float32]:
        """Return the last sampled row's hidden state of each chunk, after the final norm: [chunks, width].

        Each chunk must have a row.
        """
        assert all(chunk.rows for chunk in step.chunks)
        last = np.cumsum([chunk.rows for chunk in step.chunks]) - 1
        with _gpu_errors():
            hidden: NDArray[np.float32] = self._hidden.float().cpu().numpy()[last]
        return hidden

    def close(self) -> None:
        """Free the device's memory."""
        self._graphs = self._decoder = self._device_sampler = self._buffers = self._last = None
        self._caches = []
        self._hidden = self._logits = torch.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, tensors: StepTensors) -> tuple[Tensor, Tensor]:
        assert self._decoder is not None, "the executor is closed"
        hidden = self._decoder.forward(tensors.ids, tensors.batch, self._caches).index_select(0, tensors.rows)
        if not len(tensors.rows):
            return hidden, hidden.new_empty((0, self._info.num_vocab))
        return hidden, self._decoder.logits(hidden)

    def _requests(self, step: Step) -> Iterator[RowRequest]:
        for chunk in step.chunks:
            history, position = self._histories.of(chunk.seq), first_position(chunk)
            for row in range(chunk.rows):
                yield RowRequest(chunk.seq.params, position + row, history, chunk.draft[:row])

    def _check(self, step: Step) -> None:
        """Assert what a kernel would answer with reading or writing somewhere else."""
        assert 0 < step.num_tokens <= self._info.max_tokens
        assert step.num_rows <= self._info.max_rows
        assert len(step.chunks) <= self._info.max_sequences
        for chunk in step.chunks:
            assert isinstance(chunk.kv, tuple)
            assert chunk.start >= 0
            assert chunk.end <= min(self._info.context, len(chunk.kv) * BLOCK_LEN)
            assert chunk.tokens == [LAST] or all(0 <= token < self._info.num_vocab for token in chunk.tokens)


@dataclass(frozen=True, slots=True)
class _Launched:
    """`Samples` that a GPU computes."""

    step: Step
    launch: Launch

    def read(self) -> list[list[Sampled]]:
        with _gpu_errors():
            return accepted_rows(self.step, self.launch.read())


def _dummy(seq: Sequence, start: int, count: int, rows: int = 1) -> Chunk:
    """Return a chunk that means nothing, over the first blocks."""
    return Chunk(seq, start, [0] * count, rows, tuple(range(-(-(start + count) // BLOCK_LEN))))


def _last_rows(step: Step) -> dict[int, int]:
    """Return the row of each sequence that has exactly one: which row is the last of several, verification decides."""
    rows, row = {}, 0
    for chunk in step.chunks:
        if chunk.rows == 1:
            rows[chunk.seq.id] = row
        row += chunk.rows
    return rows


def device_name(device: torch.device) -> str:
    """Return what a person calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def _gpu_errors(hint: str = "see `edgelm doctor`") -> Iterator[None]:
    """Turn what torch and the driver raise into one line."""
    try:
        yield
    except NoKernelError as error:
        raise EngineError(str(error), "use --engine llama, or --device cpu") from error
    except RuntimeError as error:  # torch.AcceleratorError too, where torch has it
        if _is_memory(error):
            what = "the memory of the GPU is used up" if "CUDA" in str(error) else "the memory is used up"
            raise OutOfMemoryError(what, "lower --ctx or --parallel, or choose a smaller --kv") from error
        if "CUDA" not in str(error):
            raise
        raise EngineError(f"the GPU failed: {str(error).splitlines()[0]}", hint) from error


def _is_memory(error: BaseException | None) -> bool:
    """Whether memory is what was missing: where that ends the capture of a graph, the error is about the capture."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
