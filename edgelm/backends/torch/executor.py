"""The executor of our own kernels: a paged KV cache in tensors, with Triton on a GPU and the reference ops on the CPU.

Owns the weights, the KV memory and the device. A step is data only: block tables, positions, rows. On a GPU, `forward`
returns while the device works, and reading the samples waits for their tokens only. Knows nothing of scheduling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.backends.followed_heads import HEADS_WINDOW
from edgelm.backends.reports import LOGGED, Reports
from edgelm.backends.snapshots import SnapshotStore
from edgelm.backends.torch.batch import NO_ROWS, StepBuffers, StepTensors, bucket_of
from edgelm.backends.torch.block_states import block_bytes, load_blocks, load_slot, save_blocks, save_slot, slot_bytes
from edgelm.backends.torch.compiling import compile_kernels
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.graph_sizes import SIZES
from edgelm.backends.torch.graphs import Graphs
from edgelm.backends.torch.heads import TorchHeads
from edgelm.backends.torch.memory import num_states
from edgelm.backends.torch.sampler import DeviceSampler, Launch, RowRequest
from edgelm.base.errors import DeviceError, LostStepError, OutOfMemoryError, SnapshotError
from edgelm.engine.core import (
    LAST,
    NOT_A_TOKEN,
    Chunk,
    CompletedSamples,
    CopyState,
    Drop,
    ExecutorInfo,
    Load,
    Masks,
    Op,
    PendingSamples,
    Sampled,
    Save,
    Step,
    Store,
)
from edgelm.engine.sampling.history import Histories
from edgelm.engine.sampling.host import HostSampler, accepted_rows, first_position
from edgelm.kernels.attention import VERIFY_LEN
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, KVFormat, LayerCache
from edgelm.kernels.delta import RING, StateCache
from edgelm.kernels.gpu_target import target_of
from edgelm.kernels.matmul import ROWS
from edgelm.kernels.tuning import TABLE
from edgelm.models.decoder import Decoder
from edgelm.models.next_head import NextHead

log = logging.getLogger(__name__)

PART_TOKENS = 64  # of a step that is computed in parts, since it needs too much memory
NUM_IN_PARTS = 1024  # larger steps with recurrent states behind one that needed too much; doubled by each further one
MAX_ROWS = ROWS  # sampled rows of a step: with more, a verified row would have other rounding than a decoded one


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """The options of an executor. All sequences share `capacity` positions, a multiple of BLOCK_LEN."""

    context: int
    capacity: int
    kv: str = "f16"
    max_sequences: int = 8
    max_tokens: int = 512
    max_rows: int = MAX_ROWS
    graphs: bool = True
    repeatable: bool = False  # prompts are computed by the kernels that decode; with at most ROWS tokens in a step
    recomputes: bool = False  # the owner computes the running sequences again after a LostStepError
    runs_ahead: bool | None = None  # None: on a GPU, where dropping a step costs less than waiting
    tuned: Path | None = None  # folder where the fastest configurations of kernels are kept; None: the defaults


class TorchExecutor:
    """An `Executor` that owns a decoder.

    `snapshots` holds blocks on their way to files and back; None: the steps have no ops. `head` predicts ahead.
    Raises OutOfMemoryError if its memory cannot be allocated; then all of it is free again, except the decoder's.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: TorchOptions,
        snapshots: SnapshotStore | None = None,
        reports: Reports = LOGGED,
        head: NextHead | None = None,
    ) -> None:
        assert options.capacity % BLOCK_LEN == 0
        assert options.context <= options.capacity
        config, device = decoder.config, decoder.device
        cache_format = FORMATS[options.kv]
        self._decoder: Decoder | None = decoder
        self._snapshots = snapshots
        if snapshots:
            snapshots.divisible = not any(layer.delta for layer in config.layers)
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
            max_draft=VERIFY_LEN - 1,
            max_chunk=VERIFY_LEN if options.repeatable else 0,
            repeatable=options.repeatable,
            num_states=num_states(options.max_sequences) if any(layer.delta for layer in config.layers) else 0,
            block_len=BLOCK_LEN,
            runs_ahead=device.type == "cuda" if options.runs_ahead is None else options.runs_ahead,
            kv_bytes_per_token=sum(
                cache_format.bytes_per_token(layer.num_kv_heads, layer.head_dim) for layer in config.layers
            ),
        )
        self._logits = torch.empty((0, decoder.vocab_size))
        self._host_sampler = HostSampler(decoder.vocab_size)
        self._device_sampler: DeviceSampler | None = None
        self._histories = Histories()
        self._host_tokens = torch.full((options.max_rows,), NOT_A_TOKEN)  # the last samples of the host sampler
        self._last_rows = NO_ROWS  # of the previous step, by sequence id
        self._caches: list[LayerCache | StateCache] = []
        self._buffers: StepBuffers | None = None
        self._graphs: Graphs | None = None
        self._heads: TorchHeads | None = None
        self._recomputes = options.recomputes
        self._splits_steps = False  # not while loading: there, a smaller context is better
        self._in_parts, self._next_in_parts = 0, NUM_IN_PARTS  # steps, of a model with recurrent states
        self._whole_tokens = PART_TOKENS  # of a step that is not computed in parts meanwhile
        try:
            with gpu_errors():
                self._allocate(decoder, options, cache_format, reports, head)
        except BaseException:
            self.close()  # here, since the error keeps this object alive while it is handled
            raise
        self._splits_steps = True

    def _allocate(
        self, decoder: Decoder, options: TorchOptions, cache_format: KVFormat, reports: Reports, head: NextHead | None
    ) -> None:
        device = decoder.device
        num_blocks = options.capacity // BLOCK_LEN
        with gpu_errors():
            self._caches = decoder.new_caches(cache_format, num_blocks, self._info.num_states, torch.float16)
            self._info = replace(self._info, state_bytes=slot_bytes(self._state_caches))
            max_rows = max(options.max_rows, SIZES[-1])  # a bucket has as many rows as tokens
            if head:
                max_rows += HEADS_WINDOW * options.max_sequences
                self._heads = TorchHeads(head, cache_format, options.max_sequences, max_rows)
            self._buffers = StepBuffers(
                max_tokens=options.max_tokens,
                max_sequences=options.max_sequences,
                max_rows=max_rows,
                max_blocks=-(-options.context // BLOCK_LEN),
                block_len=BLOCK_LEN,
                device=device,
            )
            if device.type == "cuda":
                self._device_sampler = self._new_sampler(options)
                if options.tuned is not None:
                    TABLE.open(options.tuned, target_of(device))
                if options.tuned is not None and options.graphs:  # measuring needs graphs too
                    self._tune(reports)
                self._compile(reports)
        if options.graphs and device.type == "cuda":
            self._capture_graphs(options, reports)
        if device.type == "cuda":
            self._warm_up(reports)

    def _new_sampler(self, options: TorchOptions) -> DeviceSampler:
        return DeviceSampler(self._info.num_vocab, max(options.max_rows, SIZES[-1]), self._device)

    def _tune(self, reports: Reports) -> None:
        """Choose the fastest configuration of each kernel, before kernels of the warm-up are compiled."""
        from edgelm.backends.torch.load_tuning import tune_model  # these import Triton, which the CPU does without
        from edgelm.backends.torch.warm_up import step_of_rows

        info = self._info
        most = min(MAX_ROWS, info.max_rows, info.max_tokens, info.context)
        tune_model(TABLE, lambda rows: self.forward(step_of_rows(rows, info.num_vocab)), most, self._device, reports)
        self._logits = torch.empty((0, info.num_vocab))

    def _compile(self, reports: Reports) -> None:
        """Compile the kernels of the warm-up beside each other, before the first one is launched."""
        from edgelm.backends.torch.compilation import recording
        from edgelm.backends.torch.warm_up import warm_up_steps  # these import Triton, which the CPU does without

        assert self._decoder is not None
        with recording() as needed:
            for step in warm_up_steps(self._decoder, self._kv_caches, self._info):
                self.forward(step)
                self.sample(step, None)  # not read: no kernel wrote it
                reports.alive()
            self._warm_up_heads(reports)
        self._last_rows = NO_ROWS
        compile_kernels(needed, lambda done, total: reports.say(f"compiling the GPU's kernels: {done} of {total}"))

    def _capture_graphs(self, options: TorchOptions, reports: Reports) -> None:
        """Capture CUDA graphs of all sizes; where memory is short, without the largest ones, or none.

        Raises DeviceError if a capture did not end well.
        """
        sizes = Graphs(options.max_sequences, options.max_tokens).sizes
        problem = ""
        while sizes and (lack := self._try_capture(Graphs(options.max_sequences, sizes[0]), reports)):
            problem = lack
            del sizes[0]
            # The sampler has graphs too. Here and not where the error is handled, which keeps the graphs alive.
            self._device_sampler = self._new_sampler(options)
            torch.cuda.empty_cache()
        if problem:
            dropped = f"of more than {sizes[0]} token{'s' if sizes[0] > 1 else ''} " if sizes else ""
            log.warning("CUDA graphs %sare not used, and such steps take longer: %s", dropped, problem)

    def _try_capture(self, graphs: Graphs, reports: Reports) -> str:
        """Capture graphs; return how memory was missing, and empty text if it was not. Raises DeviceError."""
        try:
            self._capture(graphs, reports)
        except OutOfMemoryError as error:
            # The driver's own error does not tell where it came from, and torch's allocator may still count a capture.
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise DeviceError(f"{error.message}, while CUDA graphs were captured", "use --no-graphs") from error
            return str(error)
        return ""

    def _capture(self, graphs: Graphs, reports: Reports) -> None:
        """Capture the graphs of the sampler and of the model."""
        assert self._buffers is not None
        assert self._device_sampler is not None
        # A capture that fails may leave its stream as the current one: `stream` restores the one before.
        stream = torch.cuda.stream(torch.cuda.current_stream())
        with gpu_errors("--no-graphs runs without CUDA graphs"), stream, torch.inference_mode():
            logits = torch.empty((graphs.sizes[0], self._info.num_vocab), dtype=torch.float32, device=self._device)
            numbers = count(1)

            def captured() -> None:
                reports.say(f"recording the GPU's steps: {next(numbers)} of {len(graphs.sizes) + graphs.num_steps}")

            for size in graphs.sizes:  # first, since the sampler's copy of the logits is the largest piece of memory
                self._device_sampler.capture(logits[:size], graphs.record)
                captured()
            graphs.capture(self._run, self._buffers, logits, captured)
            self._graphs = graphs

    def _warm_up(self, reports: Reports) -> None:
        """Run steps that compile every kernel, and allocate memory for all later steps, before the first request."""
        from edgelm.backends.torch.warm_up import warm_up_steps  # it imports Triton, which the CPU does without

        assert self._decoder is not None
        for step in warm_up_steps(self._decoder, self._kv_caches, self._info):
            self.forward(step)
            self.sample(step, None).read()
            reports.alive()
        self._warm_up_heads(reports)

    def _warm_up_heads(self, reports: Reports) -> None:
        for _ in self._heads.warm_up() if self._heads else ():
            reports.alive()

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def heads(self) -> TorchHeads | None:
        return self._heads

    def forward(self, step: Step) -> None:
        """Do the ops, then run the chunks.

        Raises OutOfMemoryError, after which other steps may run, and DeviceError, after which none can. A step that
        needs too much memory is computed in parts. Recurrent states cannot be moved a second time: LostStepError if the
        owner recomputes, and from then on steps as large are computed in parts at once, for a while.
        """
        for op in step.ops:
            self._apply(op)
        if not step.chunks:
            return
        self._check(step)
        if self._in_parts and step.num_tokens > self._whole_tokens and self._needs_memory(step):
            self._in_parts -= 1
            self._logits = self._forward_in_parts(step)
            return
        try:
            self._logits = self._forward(step)
            return
        except OutOfMemoryError as error:
            moved = self._info.num_states > 0
            if not self._splits_steps or (moved and not (self._recomputes and self._needs_memory(step))):
                raise
            message = error.message
        # Here and not above, where the error would keep the memory of the first try.
        self._logits = torch.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if moved:
            self._in_parts, self._next_in_parts = self._next_in_parts, 2 * self._next_in_parts
            self._whole_tokens = min(PART_TOKENS, step.num_tokens - 1)
            raise LostStepError(f"{message} by a step of {step.num_tokens} tokens")
        log.warning("%s: a step of %d tokens is computed in parts", message, step.num_tokens)
        self._logits = self._forward_in_parts(step)

    def _needs_memory(self, step: Step) -> bool:
        """Tell whether a step allocates memory: no graph holds it."""
        return not (self._graphs and self._graphs.bucket(bucket_of(step)))

    def _forward_in_parts(self, step: Step) -> Tensor:
        """Run a step that needs too much memory part by part. KV that a first try wrote is written again."""
        parts = [self._forward(part)[: part.num_rows].clone() for part in parts_of(step)]  # a graph's are its own
        with torch.inference_mode():
            return torch.cat(parts)

    def _forward(self, step: Step) -> Tensor:
        """Run chunks; return the logits of their rows, and perhaps of padding."""
        assert self._buffers is not None, "the executor is closed"
        others = self._heads.others(step) if self._heads else []
        size = bucket_of(step, len(others))
        bucket = self._graphs.bucket(size) if self._graphs else None
        with gpu_errors(), torch.inference_mode():
            self._buffers.fill(step, bucket or size, self._last_rows, others)
            if bucket and self._graphs:
                logits = self._graphs.replay(bucket)
            else:
                logits = self._run(self._buffers.views(size))
            if self._heads:
                self._heads.take(step)
        return logits

    def sample(self, step: Step, masks: Masks | None) -> PendingSamples:
        """Start sampling the rows of each chunk, up to the first that differs from the draft. Raises EngineError."""
        if not step.num_rows:
            return CompletedSamples([[] for _ in step.chunks])
        last_rows = _last_rows(step)
        if self._device_sampler is None:
            sampled = self._host_sampler.sample(step, self.logits(step), masks)
            for chunk, rows in zip(step.chunks, sampled, strict=True):
                if chunk.seq.id in last_rows:
                    self._host_tokens[last_rows[chunk.seq.id]] = rows[0].id
            self._last_rows = last_rows
            return CompletedSamples(sampled)
        with gpu_errors(), torch.inference_mode():
            launch = self._device_sampler.launch(self._logits[: step.num_rows], self._requests(step), masks)
        self._last_rows = last_rows
        return _PendingOnGPU(step, launch)

    def logits(self, step: Step) -> NDArray[np.float32]:
        """Return the logits of the sampled rows, valid until the next `forward`: [rows, vocab_size]."""
        with gpu_errors():
            logits: NDArray[np.float32] = self._logits[: step.num_rows].float().cpu().numpy()
        return logits

    def close(self) -> None:
        """Free the device's memory."""
        if self._snapshots:
            self._snapshots.close()
        self._ask_gpu(torch.cuda.synchronize)  # it may still run a graph
        self._graphs = self._decoder = self._device_sampler = self._buffers = self._heads = None
        self._caches = []
        self._logits = torch.empty(0)
        self._ask_gpu(torch.cuda.empty_cache)

    def _ask_gpu(self, call: Callable[[], object]) -> None:
        """Make a call of CUDA, if that is the device. After an illegal access every call raises, and none is needed."""
        if self._device.type == "cuda":
            with suppress(RuntimeError):
                call()

    def _run(self, tensors: StepTensors, out: Tensor | None = None) -> Tensor:
        """Return the logits of the sampled rows, float32 [rows, vocab_size]; they go to `out` if it is given."""
        assert self._decoder is not None, "the executor is closed"
        last = self._device_sampler.tokens if self._device_sampler else self._host_tokens
        hidden = self._decoder.forward_rows(tensors.ids, tensors.batch, self._caches, tensors.rows, last)
        if self._heads:
            self._heads.write(hidden)
        if not tensors.num_sampled:
            return hidden.new_empty((0, self._info.num_vocab), dtype=torch.float32)
        return self._decoder.logits(hidden[: tensors.num_sampled], out)

    def _apply(self, op: Op) -> None:
        """Copy a state; save, load or store blocks. Raises SnapshotError for a state that cannot be loaded."""
        if isinstance(op, CopyState):
            with gpu_errors(), torch.inference_mode():
                for cache in self._state_caches:
                    cache.copy(op.src, op.dst)
            return
        assert self._snapshots is not None
        match op:
            case Save(tuple(blocks), key, slot):
                self._save(blocks, key, slot)
            case Load(key, tuple(blocks), first, slot):
                state = self._snapshots.get(key)
                try:
                    with gpu_errors(), torch.inference_mode():
                        if slot is not None:
                            state = load_slot(self._state_caches, state, slot)
                        load_blocks(self._kv_caches, state, blocks, first)
                except SnapshotError:
                    self._snapshots.refuse(key)
                    raise
            case Drop(key):
                self._snapshots.drop(key)  # it may not exist: there was no room, or a failed step did not save it
            case Store():
                self._snapshots.store(op)
            case _:
                raise AssertionError(op)

    @property
    def _kv_caches(self) -> list[LayerCache]:
        return [cache for cache in self._caches if isinstance(cache, LayerCache)]

    @property
    def _state_caches(self) -> list[StateCache]:
        return [cache for cache in self._caches if isinstance(cache, StateCache)]

    def _save(self, blocks: tuple[int, ...], key: int, slot: int | None) -> None:
        """Copy blocks to the host, and the state in a slot, if there is room."""
        assert self._snapshots is not None
        size = len(blocks) * block_bytes(self._kv_caches)
        size += 0 if slot is None else slot_bytes(self._state_caches)
        state = self._snapshots.new_state(size)
        if state is None:
            return
        with gpu_errors(), torch.inference_mode():
            part = state if slot is None else save_slot(self._state_caches, slot, state)
            save_blocks(self._kv_caches, blocks, part)
        self._snapshots.put(key, state)

    def _requests(self, step: Step) -> Iterator[RowRequest]:
        for chunk in step.chunks:
            history, position = self._histories.of(chunk.seq), first_position(chunk)
            for row in range(chunk.rows):
                yield RowRequest(chunk.seq.params, position + row, history, chunk.draft[:row])

    def _check(self, step: Step) -> None:
        """Assert the bounds of the step; beyond them, a kernel would read or write foreign memory."""
        assert 0 < step.num_tokens <= self._info.max_tokens
        assert step.num_rows <= self._info.max_rows
        assert len(step.chunks) <= self._info.max_sequences
        for chunk in step.chunks:
            assert isinstance(chunk.kv, tuple)
            assert chunk.start >= 0
            if self._info.num_states and (state := chunk.state):
                assert 0 <= state.slot < self._info.num_states
                assert chunk.end - RING // 2 - VERIFY_LEN < state.start <= chunk.start or state.start == chunk.start
                assert state.start < state.goal <= chunk.end
                assert state.goal == chunk.end or len(chunk.tokens) <= VERIFY_LEN
            assert chunk.end <= min(self._info.context, len(chunk.kv) * BLOCK_LEN)
            assert chunk.tokens == [LAST] or all(0 <= token < self._info.num_vocab for token in chunk.tokens)


@dataclass(frozen=True, slots=True)
class _PendingOnGPU:
    """The `PendingSamples` of a GPU."""

    step: Step
    launch: Launch

    def read(self) -> list[list[Sampled]]:
        with gpu_errors():
            return accepted_rows(self.step, self.launch.read())


def _last_rows(step: Step) -> dict[int, int]:
    """Return the row of each sequence with exactly one; of several, only verification finds the last one."""
    rows, row = {}, 0
    for chunk in step.chunks:
        if chunk.rows == 1:
            rows[chunk.seq.id] = row
        row += chunk.rows
    return rows


def device_name(device: torch.device) -> str:
    """Return the name of a device, as it is shown."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def parts_of(step: Step, max_tokens: int = PART_TOKENS) -> Iterator[Step]:
    """Yield steps of one sequence and at most so many tokens; their rows, in order, are those of the step."""
    for chunk in step.chunks:
        first_row = len(chunk.tokens) - chunk.rows
        for begin in range(0, len(chunk.tokens), max_tokens):
            tokens = chunk.tokens[begin : begin + max_tokens]
            rows = max(begin + len(tokens) - max(begin, first_row), 0)
            start, state = chunk.start + begin, chunk.state
            if state and len(tokens) < len(chunk.tokens):  # of a prompt, whose state moves with the chunk
                state = state._replace(start=start, goal=start + len(tokens))
            yield Step((Chunk(chunk.seq, start, tokens, rows, chunk.kv, state),))
