"""The self-check: each op of a model, by its kernel and by plain torch on the same device, at the model's own shapes.

A decoder of some of the model's layers, two of each kind, runs steps of all kinds. Whenever it calls an op, the kernel
and the reference compute the same arguments, and the results are compared; the reference's goes on, so that a wrong
kernel spoils no other verdict. Memory that nobody has written is NaN. At last a CUDA graph is compared with its step.

Owns the steps, the comparison and its bounds. Knows nothing of processes, of time limits and of the consequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from edgelm.backends.gpu_check import NO_NUMBER, OpVerdict
from edgelm.backends.model import OpenedModel
from edgelm.backends.torch.build import weights_of
from edgelm.backends.torch.check_bounds import RARE, Bound, bounds_of
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.sampler import DeviceSampler, RowRequest
from edgelm.backends.torch.trial import nan_filled
from edgelm.base.errors import CompiledKernelError, EngineError, ModelError, OutOfMemoryError
from edgelm.base.sampling import SamplingParams
from edgelm.checkpoints.gguf import GGUF
from edgelm.engine.core import LAST, Chunk, StateSpan, Step
from edgelm.engine.core import Sequence as TokenSequence
from edgelm.engine.sampling.history import History
from edgelm.kernels import cache as kv_cache
from edgelm.kernels.attention import VERIFY_LEN
from edgelm.kernels.cache import LayerCache
from edgelm.kernels.cache.quantize import GROUP
from edgelm.kernels.choice import Implementation, observed_by
from edgelm.kernels.delta import StateCache
from edgelm.kernels.layout import DenseWeight, PackedWeight
from edgelm.kernels.sampling import Answer
from edgelm.models.config import ModelConfig
from edgelm.models.decoder import Decoder
from edgelm.models.families import LAYER
from edgelm.models.loading.decoder import load, load_next_head
from edgelm.models.next_head import NextHead

GRAPHS = "CUDA graphs"  # an op of its own in the verdicts
MAX_LAYERS = 4  # of different kinds
MAX_COMPARED = 2  # calls of one op with one kind of arguments
CONTEXT, STEP_TOKENS = 1024, 512
PROMPTS = 70, 40  # rows: more than any decode kernel takes, and no multiple of 16
LONG_PROMPT = 512  # rows for which a weight is dequantized as a whole
VERIFIED = 5
# Of the difference, relative to the largest value, and to the root mean square, for all elements together: beside the
# bounds of check_bounds.py. A correct kernel differs by the rounding of 16-bit numbers (2**-8) and of sums; a code of 4
# bits that is off by one, by 1/8 of the largest value.
WRITERS = frozenset({"write_kv", "gated_delta"})  # ops that change a cache
LIMITS = {"write_kv": (0.2, 2.0**-6)}
LIMIT = 2.0**-4, 2.0**-6


Run = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two results are apart: relative to the largest value, and to the root mean square.

    `within`: each element is within the bound of its own, and a whole number is equal.
    """

    largest: float
    mean: float
    within: bool = True


class Comparison:
    """Compares kernels with references, and keeps a verdict of each op and kind of arguments.

    `begins` is called before the first run of each kernel, which may crash or hang.
    """

    def __init__(self, begins: Callable[[str, str], None]) -> None:
        self.verdicts: dict[tuple[str, str], OpVerdict] = {}
        self.begins = begins
        self._counts: dict[tuple[str, str], int] = {}

    def observe(
        self, op: str, kernel: Implementation, plain: Implementation, args: tuple[object, ...]
    ) -> Implementation:
        """Return an implementation that computes both, compares them, and returns the reference's result."""
        key = op, described(args)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count > MAX_COMPARED:
            return plain if self._is_wrong(key) else kernel
        if count == 1:
            self.begins(*key)
        return kernel._replace(run=partial(self._compare, key, args, kernel.run, plain.run))

    def note(self, key: tuple[str, str], difference: Difference | None, error: str = "") -> None:
        """Keep the worse of this and the verdict so far."""
        largest, mean = LIMITS.get(key[0], LIMIT)
        if difference is None:
            verdict = OpVerdict(*key, right=False, off=NO_NUMBER, error=f"fails: {error}")
        else:
            right = difference.within and difference.largest <= largest and difference.mean <= mean
            verdict = OpVerdict(*key, right=right, off=min(difference.largest, NO_NUMBER))
        old = self.verdicts.get(key)
        if old is None or (old.right, -old.off) > (verdict.right, -verdict.off):
            self.verdicts[key] = verdict

    def _is_wrong(self, key: tuple[str, str]) -> bool:
        verdict = self.verdicts.get(key)
        return verdict is not None and not verdict.right

    def _compare(
        self, key: tuple[str, str], chosen: tuple[object, ...], kernel: Run, plain: Run, *args: Any, **named: Any
    ) -> object:
        given = args or chosen if key[0] in WRITERS else ()  # what `dispatch` runs has its arguments already
        written = [arg for arg in given if isinstance(arg, LayerCache | StateCache)]
        out = named.get("out", args[-1] if key[0] == "attention" else None)
        before = [{name: plane.clone() for name, plane in cache.planes.items()} for cache in written]
        if isinstance(out, Tensor):
            out.fill_(math.nan)
        got: list[Tensor] = []
        error = ""
        try:
            with gpu_errors():
                got = _results(key[0], kernel(*args, **named), out, written)
                if got and got[0].is_cuda:
                    torch.cuda.synchronize(got[0].device)
        except (OutOfMemoryError, CompiledKernelError):
            raise
        except (EngineError, RuntimeError, AssertionError) as problem:
            error = (str(problem).splitlines() or [type(problem).__name__])[0]
        if error:
            self.note(key, None, error)
        for cache, planes in zip(written, before, strict=True):
            for name, plane in planes.items():
                cache.planes[name].copy_(plane)
        try:
            with gpu_errors():
                result = plain(*args, **named)
                if not error:
                    wanted = _results(key[0], result, out, written)
                    bounds = bounds_of(key[0], chosen, args, wanted) or []
                    for one, other, bound in zip_longest(got, wanted, bounds):
                        self.note(key, difference_of(one, other, bound))
                return result
        except OutOfMemoryError:
            self.verdicts.setdefault(key, OpVerdict(*key, unknown=True))
        return kernel(*args, **named)


def _results(op: str, result: object, out: object, written: Sequence[LayerCache | StateCache]) -> list[Tensor]:
    """Return copies of all that an op has computed."""
    if isinstance(out, Tensor):
        tensors: tuple[Any, ...] = (out,)
    else:
        tensors = result if isinstance(result, tuple) else (result,)
    for cache in written:
        if isinstance(cache, StateCache):
            tensors += tuple(cache.planes.values())
        else:
            all_blocks = torch.arange(cache.num_blocks, device=cache.device)
            tensors += kv_cache.read(cache, all_blocks, cache.num_blocks * kv_cache.BLOCK_LEN)
    if op == "sample":  # what was not asked for is not written
        tensors = tuple(answers[:, Answer.TOKEN] for answers in tensors)
    return [tensor.clone() for tensor in tensors]


def difference_of(got: Tensor, want: Tensor, bound: Bound | None = None) -> Difference:
    """Return how far a result is off. Whole numbers are right or wrong: a share of wrong ones is the difference.

    Elements that are equal are within their bound, infinities and NaN too.
    """
    if not want.is_floating_point():
        wrong = float((got != want).double().mean())
        return Difference(wrong, wrong, not wrong)
    expected, off = want.double(), (got.double() - want.double())
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))  # infinities, too
    off = torch.where(same, 0.0, off)
    if not bool(torch.isfinite(off).all()):
        return Difference(math.inf, math.inf)
    within = bound is None or _is_within(off, bound)
    finite = expected[torch.isfinite(expected)]
    if not finite.numel() or not float(finite.abs().max()):
        return Difference(float(off.abs().max()) if off.numel() else 0.0, 0.0, within)
    largest = float(off.abs().max() / finite.abs().max())
    return Difference(largest, float(off.square().mean().sqrt() / finite.square().mean().sqrt()), within)


def _is_within(off: Tensor, bound: Bound) -> bool:
    """Return whether all differences are within the bound, and nearly all within the usual one."""
    if not bool(((off == 0) | (off.abs() <= bound.most)).all()):  # a bound may be NaN where x is
        return False
    unusual = 0 if bound.usual is None else int((off.abs() > bound.usual).sum())
    return unusual <= max(RARE * bound.num_written, GROUP)


def described(args: Sequence[object]) -> str:
    """Return the formats and shapes by which a kernel is chosen, as text."""
    words = []
    for arg in args:
        if isinstance(arg, PackedWeight | DenseWeight):
            kind = arg.layout.name if isinstance(arg, PackedWeight) else str(arg.data.dtype).removeprefix("torch.")
            stack = f"{arg.num_matrices}x" if arg.num_matrices else ""
            words.append(f"{kind} {stack}{arg.rows}x{arg.columns}{' gated' if arg.gated else ''}")
        elif isinstance(arg, LayerCache):
            words.append(f"{arg.format.name}, heads of {arg.head_dim}")
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    rows = [f"{first.shape[0]} row{'' if first.shape[0] == 1 else 's'}"] if first is not None and first.ndim else []
    if not words and first is not None and first.ndim:
        words.append("x".join(map(str, first.shape[1:])))
    return ", ".join([*words, *rows])


# -- the steps of a model ----------------------------------------------------------------------------------------------


def check_model(
    model: OpenedModel,
    device: torch.device,
    dtype: torch.dtype,
    modes: Sequence[str],
    *,
    quantize: str = "off",
    short: bool = False,
    counts: Callable[[int], None] = lambda _: None,
    begins: Callable[[str, str], None] = lambda _, __: None,
) -> list[OpVerdict]:
    """Check the ops of a model in these KV modes; `short`: those of a prompt and of a token behind it.

    `counts` gets the number of kernels beforehand, `begins` is called before the first run of each. Raises ModelError,
    and EngineError for a lack of memory.
    """
    comparison = Comparison(begins)
    with gpu_errors(), nan_filled(), torch.inference_mode():
        decoder, head = _some_layers(model, device, dtype, quantize)
        with_graphs = device.type == "cuda" and not short
        counts(_num_kernels(decoder, head, device, modes, short=short) + with_graphs * len(modes))
        for mode in modes:
            with observed_by(comparison.observe):
                executor = _run(decoder, head, device, mode, short=short, samples=mode == modes[0])
            if with_graphs:
                _check_graph(decoder, mode, executor, comparison)
    return list(comparison.verdicts.values())


def _run(
    decoder: Decoder, head: NextHead | None, device: torch.device, mode: str, *, short: bool, samples: bool
) -> TorchExecutor:
    """Run the steps with an executor of their own, and passes of the head; return it."""
    executor = TorchExecutor(decoder, _options(mode), head=head)
    logits = (_run_short(executor) if short else _run_steps(executor)).to(device)
    for _ in executor.heads.warm_up(most=1 if short else VERIFY_LEN) if executor.heads else ():
        pass
    if samples:
        _sample(logits)
    return executor


def _num_kernels(
    decoder: Decoder, head: NextHead | None, device: torch.device, modes: Sequence[str], *, short: bool
) -> int:
    """Return how many kernels the steps try: plain torch runs them once, which takes a moment. 0: no memory for it."""
    found = set()

    def note(op: str, _: Implementation, plain: Implementation, args: tuple[object, ...]) -> Implementation:
        found.add((op, described(args)))
        return plain

    try:
        with observed_by(note):
            for mode in modes:
                _run(decoder, head, device, mode, short=short, samples=mode == modes[0])
    except OutOfMemoryError:
        return 0
    return len(found)


def _options(mode: str, *, graphs: bool = False) -> TorchOptions:
    return TorchOptions(
        context=CONTEXT, capacity=2 * CONTEXT, kv=mode, max_sequences=4, max_tokens=STEP_TOKENS, graphs=graphs
    )


def _run_short(executor: TorchExecutor) -> Tensor:
    """Run a prompt and one token behind it; return its logits.

    A first token alone shows little: its attention sees one key, whatever the products are, and nothing is rotated.
    """
    walk = _Walk(0, executor.info.num_vocab)
    executor.forward(Step((walk.chunk(PROMPTS[0], 1),)))
    step = Step((walk.chunk(1, 1),))
    executor.forward(step)
    return torch.from_numpy(executor.logits(step))


def _run_steps(executor: TorchExecutor) -> Tensor:
    """Run a prompt, a step ahead, a second prompt beside a decoded token, the verification of drafts, and a step after.

    Return the last logits.
    """
    first, second = _Walk(0, executor.info.num_vocab), _Walk(1, executor.info.num_vocab)
    prompt = Step((first.chunk(PROMPTS[0], 1),))
    executor.forward(prompt)
    executor.sample(prompt, None)
    executor.forward(Step((replace(first.chunk(1, 1), tokens=[LAST]),)))
    executor.forward(Step((first.chunk(1, 1), second.chunk(PROMPTS[1], 1))))
    if LONG_PROMPT:
        executor.forward(Step((second.chunk(LONG_PROMPT, 1),)))
    executor.forward(Step((first.chunk(VERIFIED, VERIFIED), second.chunk(VERIFIED, VERIFIED))))
    step = Step((first.chunk(1, 1), second.chunk(1, 1)))  # moves recurrent states over the accepted drafts, too
    executor.forward(step)
    return torch.from_numpy(executor.logits(step))


class _Walk:
    """A sequence of tokens that a model never saw, over blocks of its own."""

    def __init__(self, number: int, num_vocab: int, params: SamplingParams | None = None) -> None:
        self._seq = TokenSequence(-1 - number, [0], 1, params or SamplingParams())
        blocks = CONTEXT // kv_cache.BLOCK_LEN
        self._slot = number
        self._blocks = tuple(range(number * blocks, (number + 1) * blocks))
        self._generator = torch.Generator().manual_seed(number)
        self._num_vocab = num_vocab
        self._computed = self._state = 0

    def chunk(self, num_tokens: int, rows: int) -> Chunk:
        """Return a chunk with `rows` - 1 drafted tokens, all accepted: the next one moves the state over them."""
        tokens = torch.randint(0, self._num_vocab, (num_tokens,), generator=self._generator).tolist()
        start, self._computed = self._computed, self._computed + num_tokens
        state, self._state = self._state, self._computed - (rows - 1)
        used = self._blocks[: -(-self._computed // kv_cache.BLOCK_LEN)]
        return Chunk(self._seq, start, tokens, rows, used, StateSpan(self._slot, state, self._state))


def _sample(logits: Tensor) -> None:
    """Sample rows with all that a request may ask for."""
    params = (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=7, num_logprobs=2),
        SamplingParams(temperature=1.2, top_p=0.9, seed=9),
        SamplingParams(temperature=1.0, seed=11, repetition_penalty=1.2, logit_bias=((1, 2.0), (2, -3.0))),
    )
    rows = [
        RowRequest(param, 100 + place, History([1, 2, 3]) if param.penalized else None, ())
        for place, param in enumerate(params)
    ]
    sampler = DeviceSampler(logits.shape[1], len(rows), logits.device, "triton")
    sampler.sample(logits[:1].expand(len(rows), -1).contiguous(), rows, None)


def _check_graph(decoder: Decoder, mode: str, plain: TorchExecutor, comparison: Comparison) -> None:
    """Compare steps that a CUDA graph replays with the same steps without one."""
    key = GRAPHS, mode
    comparison.begins(*key)
    try:
        replayed = TorchExecutor(decoder, _options(mode, graphs=True))
        comparison.note(key, difference_of(_run_ahead(replayed), _run_ahead(plain)))
        replayed.close()
    except CompiledKernelError:
        raise
    except EngineError as error:
        comparison.note(key, None, error.message)


def _run_ahead(executor: TorchExecutor) -> Tensor:
    """Run a step of a known token, and one of the token that it samples, unread by the host; return both logits."""
    sampled = executor.info.num_vocab - 1
    walk = _Walk(0, executor.info.num_vocab, SamplingParams(temperature=0, logit_bias=((sampled, 1e9),)))
    known, ahead = Step((walk.chunk(1, 1),)), Step((replace(walk.chunk(1, 1), tokens=[LAST]),))
    executor.forward(known)
    logits = torch.from_numpy(executor.logits(known)).clone()
    samples = executor.sample(known, None)
    executor.forward(ahead)
    samples.read()
    return torch.cat((logits, torch.from_numpy(executor.logits(ahead))))


def _some_layers(
    model: OpenedModel, device: torch.device, dtype: torch.dtype, quantize: str
) -> tuple[Decoder, NextHead | None]:
    """Load layers of each kind, the ends of the model, and its head that predicts ahead, if it can be loaded."""
    config, source = weights_of(model, quantize)
    layers = layers_to_try(config, model.gguf)
    decoder = load(config, source, device, dtype, "triton", context=CONTEXT, only_layers=layers)
    try:
        return decoder, load_next_head(decoder, *weights_of(model.with_head, quantize), CONTEXT)
    except ModelError:  # the model runs without it
        return decoder, None


def layers_to_try(config: ModelConfig, gguf: GGUF | None) -> list[int]:
    """Return layers of at most MAX_LAYERS kinds, each by its configuration and the formats of its matrices.

    The first layer of each kind comes twice in a row: a matmul before another layer also prepares its norm, and one
    behind another layer finishes that. At the end of the model no norm is prepared, so the kind of its last layer is
    last.
    """
    formats: dict[int, list[str]] = {}
    for tensor in gguf.tensors.values() if gguf else ():
        if match := LAYER.match(tensor.name):
            formats.setdefault(int(match[1]), []).append(f"{LAYER.sub('', tensor.name)} {tensor.type.name}")
    kinds = [(repr(layer), tuple(sorted(formats.get(i, ())))) for i, layer in enumerate(config.layers)]
    first = {kind: kinds.index(kind) for kind in kinds}
    tried = [layer for layer in list(first.values())[:MAX_LAYERS] for _ in range(2)]
    last = first[kinds[-1]]
    return [*tried, last] if last in tried and last != tried[-1] else tried
