"""The mutations of `tests.kernels.mutations`: each replaces a text that occurs once in its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake in one place, and the tests of which at least one must fail."""

    file: str  # in the repository: "kernels/layout.py"
    mistake: str
    old: str  # occurs exactly once
    new: str
    tests: str  # arguments of pytest

    @property
    def title(self) -> str:
        return f"{self.file}: {self.mistake}"

    def apply(self, repository: Path) -> str:
        """Return the file's text with the mistake in it; raise ValueError if the list is out of date."""
        text = (repository / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.title}: {self.old!r} occurs {text.count(self.old)} times")
        changed = text.replace(self.old, self.new)
        compile(changed, self.file, "exec")
        return changed


def _of(file: str, tests: str, *mistakes: tuple[str, str, str]) -> list[Mutation]:
    """Return the mutations of a file that the same tests notice: a mistake in words, the old text, the new one."""
    return [Mutation(file, *mistake, tests) for mistake in mistakes]


MUTATIONS = [
    *_of(
        "kernels/layout.py",
        "tests/kernels/test_layout.py",
        (
            "nibbles of a word in the wrong order",
            "low = _join(nibbles, torch.arange(0, 32, 4))",
            "low = _join(nibbles, torch.arange(28, -4, -4))",
        ),
        (
            "scales one group too far",
            "scale = _scale_values(weight).repeat_interleave(",
            "scale = _scale_values(weight).roll(1, -1).repeat_interleave(",
        ),
        (
            "minimums with the factor of the scales",
            "return _super_values(weight, 1) * mins",
            "return _super_values(weight, 0) * mins",
        ),
        ("up before gate", "torch.stack(parts, dim + 1)", "torch.stack(parts[::-1], dim + 1)"),
    ),
    *_of(
        "kernels/unpack.py",
        "tests/kernels/test_dequantize.py",
        (
            "halves of a word exchanged",
            "code = (words >> (4 * SLOT + 16 * H)) & 15",
            "code = (words >> (4 * SLOT + 16 * (1 - H))) & 15",
        ),
        (
            "a fifth bit from the slot beside",
            "((high >> (SLOT + 16 * H)) & 1)",
            "((high >> ((SLOT ^ 1) + 16 * H)) & 1)",
        ),
    ),
    *_of(
        "kernels/unpack.py",
        "tests/kernels/test_unpack.py",
        ("assembly: a slot too far", "shift = 4 * slot - at", "shift = 4 * slot - at + 4 * (slot > 2)"),
        ("assembly: the second pair of bytes is the first", "{(0x4140, 0x4342)[p]:#x}", "{(0x4140, 0x4140)[p]:#x}"),
        ("assembly: e4m3 without its sign", "lop3.b32 h, t, 0x80008000,", "lop3.b32 h, t, 0x00008000,"),
    ),
    *_of(
        "kernels/unpack.py",
        "tests/kernels/test_matmul.py",
        (
            "x in another order than the weight",
            "x = tl.permute(x, [0, 3, 4, 2, 5, 1] if KW == 2",
            "x = tl.permute(x, [0, 4, 3, 2, 5, 1] if KW == 2",
        ),
    ),
    *_of(
        "kernels/dequantize/kernel.py",
        "tests/kernels/test_dequantize.py",
        (
            "no mask of the columns",
            "inside = (row < rows)[:, None] & (column < columns)[None, :]",
            "inside = (row < rows)[:, None] & (column >= 0)[None, :]",
        ),
        (
            "scales of the first group for all",
            "PER + (index if GROUP < 64 else 0)",
            "PER + 0 * (index if GROUP < 64 else 0)",
        ),
        (
            "the factor of another 256 columns",
            "entry = tile * (chunks // 4) + chunk // 4",
            "entry = tile * (chunks // 4) + chunk // 8",
        ),
    ),
    *_of(
        "kernels/matmul/scales.py",
        "tests/kernels/test_matmul.py",
        (
            "padding multiplies with its garbage",
            "out += (tl.where(columns + i * GROUP < K, value, 0.0)",
            "out += (tl.where(columns < K, value, 0.0)",
        ),
    ),
    *_of(
        "kernels/matmul/step_kernel.py",
        "tests/kernels/test_matmul.py",
        (
            "scale and minimum exchanged",
            'offset = times(offset, scale_number(word, 1, "f16"))',
            'offset = times(offset, scale_number(word, 0, "f16"))',
        ),
    ),
    *_of(
        "kernels/matmul/kernel.py",
        "tests/kernels/test_matmul.py",
        (
            "a part of K is left out",
            "last = tl.minimum(first + EACH, EVEN)",
            "last = tl.minimum(first + EACH, EVEN - 2)",
        ),
        ("the last split is dropped", "tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)"),
    ),
    *_of(
        "kernels/matmul/kernel.py",
        "tests/kernels/test_matmul.py::test_prefetching_and_tiles_change_no_bit",
        ("a step ahead is loaded twice", "pid, tl.minimum(step + 3, end)", "pid, tl.minimum(step + 2, end)"),
    ),
    *_of(
        "models/loading/packed.py",
        "tests/models/loading/test_sources.py",
        (
            "every slice is put at the beginning",
            "tiles = slice(first_row // TILE, (first_row + rows + short) // TILE)",
            "tiles = slice(0, (rows + short) // TILE)",
        ),
        (
            "a stack has one matrix",
            "return plane[matrix] if self._stacked else plane",
            "return plane[0] if self._stacked else plane",
        ),
    ),
    *_of(
        "kernels/embedding/kernel.py",
        "tests/kernels/test_embedding.py",
        ("upper bits of the wrong row", "shift = 2 * (s + 4 * rb) + 16 * h", "shift = 2 * (s + 2 * rb) + 16 * h"),
        (
            "a token that the device knows is that of the row before",
            "place = -1 - row",
            "place = tl.maximum(-2 - row, 0)",
        ),
        (
            "no token that the device knows is read as row -1",
            "tl.maximum(tl.load(last + place * last_stride, mask=named, other=0), 0)",
            "tl.load(last + place * last_stride, mask=named, other=0)",
        ),
    ),
    *_of(
        "kernels/grouped/kernel.py",
        "tests/kernels/test_grouped.py",
        (
            "experts summed from the last to the first",
            "for j in tl.static_range(K):",
            "for j in tl.static_range(K - 1, -1, -1):",
        ),
    ),
    *_of(
        "kernels/matmul/operands.py",
        "tests/kernels/test_grouped.py",
        ("matrices of a stack without their stride", "return plane.flatten(-2).view(", "return plane.view(-1).view("),
    ),
    *_of(
        "models/loading/stored.py",
        "tests/models/loading/test_stored.py",
        (
            "high nibbles first",
            "torch.cat((packed & 15, packed >> 4), -1)",
            "torch.cat((packed >> 4, packed & 15), -1)",
        ),
    ),
    *_of(
        "models/loading/quantized_folder.py",
        "tests/models/loading/test_quantized_folder.py::test_quantized_experts_become_one_stack",
        (
            "AWQ's nibbles in the inverse order",
            "AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)",
            "AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)",
        ),
    ),
    *_of(
        "models/loading/quantized_folder.py",
        "tests/models/loading/test_quantized_folder.py::test_experts_have_their_columns_in_orders_of_their_own",
        ("GPTQ's zero points one too small", "if self._zero_less_one:", "if not self._zero_less_one:"),
    ),
    *_of(
        "kernels/matmul/step_kernel.py",
        "tests/kernels/test_matmul.py::test_every_format_equals_float64",
        ("the zero is added", "t = tl.fma(-o,", "t = tl.fma(o,"),
        (
            "the scale of the next group",
            "s = tl.broadcast_to(scale[i][:, :, None]",
            "s = tl.broadcast_to(scale[(i + 1) % GROUPS][:, :, None]",
        ),
    ),
    *_of(
        "kernels/matmul/kernel.py",
        "tests/kernels/test_matmul.py::test_lengths_bias_gate_and_residual",
        ("up with the bias of gate", "with_bias(up, bias, at + 16, N)", "with_bias(up, bias, at, N)"),
        ("a product is not divided by the length of its row", "y *= lengths[tt]", "y *= 1.0"),
    ),
    *_of(
        "kernels/matmul/finish_kernel.py",
        "tests/kernels/test_matmul.py::test_lengths_bias_gate_and_residual",
        ("all rows have the residual of the first", "row.to(tl.int64) * residual_stride", "row.to(tl.int64) * 0"),
    ),
    *_of(
        "kernels/matmul/kernel.py",
        "tests/kernels/test_matmul.py::test_every_format_has_the_same_bits_for_any_number_of_rows",
        (
            "every program multiplies the first rows",
            "x += first_row.to(tl.int64) * x_stride",
            "x += first_row.to(tl.int64) * 0",
        ),
    ),
    *_of(
        "kernels/dequant_gemm/kernel.py",
        "tests/kernels/test_grouped.py",
        ("the row of another pair", "row = tl.load(order + first + index,", "row = tl.load(order + first + index * 0,"),
    ),
    *_of(
        "kernels/norm/kernel.py",
        "tests/kernels/test_norm.py",
        (
            "the residual is forgotten",
            "return (tl.load(residual_ptr + at, inside, other=0.0) + x) * sum_scale",
            "return x * sum_scale",
        ),
    ),
    *_of(
        "kernels/activation/kernel.py",
        "tests/kernels/test_activation.py",
        ("up is limited from above only", "tl.where(up < -LIMIT, -LIMIT, up)", "up"),
        ("up is read one column too far", "up_at = width + at", "up_at = width + at + 1"),
    ),
    *_of(
        "kernels/route/kernel.py",
        "tests/kernels/test_route.py",
        ("of equal scores the higher id comes first", "(0x7FFFFFFF - expert)", "expert"),
    ),
    *_of(
        "kernels/delta/kernel.py",
        "tests/kernels/test_delta.py",
        ("a state is moved over drafts, too", "if at + 1 == goal:", "if at + 1 == end:"),
        ("inputs before the step are not read", "is_kept = (position < start)", "is_kept = (position < 0)"),
        ("tokens of a chunk do not correct each other", "range(CHUNK - 1)", "range(0)"),
    ),
    *_of(
        "kernels/rope.py",
        "tests/kernels/test_rope.py",
        ("a term of the cosine is missing", "for n in range(6)", "for n in range(4)"),
        (
            "angles of float32",
            "turns = self.frequencies.double() / (2 * pi)",
            "turns = (self.frequencies / (2 * pi)).double()",
        ),
    ),
    *_of(
        "kernels/write_kv/kernel.py",
        "tests/kernels/test_write_kv.py",
        ("interleaved dimensions without their partners", "partner = d ^ 1", "partner = d"),
        (
            "queries grow by the factor of the span before",
            "tl.minimum(position // span, last_span)",
            "tl.maximum(tl.minimum(position // span, last_span) - 1, 0)",
        ),
        (
            "the padding of a last pair of groups is stored",
            "codes = tl.where(tl.arange(0, P)[None, :] < WIDTH, codes, 0)",
            "codes = codes",
        ),
    ),
    *_of(
        "kernels/cache/kernel.py",
        "tests/kernels/test_write_kv.py",
        (
            "the rotation in another order",
            "x = _butterfly(x, 16 >> step, ROWS, P)",
            "x = _butterfly(x, 1 << step, ROWS, P)",
        ),
        ("e4m3: halves are rounded up", "+ ((size >> 20) & 1)", "+ 1"),
        (
            "e4m3: the smallest normal numbers are taken for denormal ones",
            "tl.abs(x) < 0.015625",
            "tl.abs(x) < 0.0078125",
        ),
        (
            "4 bits: of two largest values the negative one",
            "tl.where(high >= low, high, -low) * (-1 / 8)",
            "tl.where(high > low, high, -low) * (-1 / 8)",
        ),
    ),
    *_of(
        "kernels/cache/order.py",
        "tests/kernels/test_cache.py",
        ("tokens of nibbles in the order of bytes", "2 * h + jb if nibbles", "2 * jb + h if nibbles"),
    ),
    *_of(
        "kernels/sampling/draw_kernel.py",
        "tests/kernels/test_sampling.py",
        (
            "top_p keeps what twice its weight would",
            "            if weight_at > bound:",
            "            if weight_at > bound * 2:",
        ),
        ("of few tokens top_p keeps one less", "(weight_above <= tl.maximum", "(weight_above < tl.maximum"),
        (
            "of few tokens the draw counts those that top_p removed",
            "& (other >= low)[None, :]",
            "& (other > LEAST)[None, :]",
        ),
        ("a chunk's draw forgets the chunks before", "(inside <= target - before)", "(inside <= target)"),
    ),
    *_of(
        "edgelm/backends/torch/sampler.py",
        "tests/backends/torch/test_sampler.py",
        (
            "draft tokens stay in the history",
            "            row.history.pop(len(row.extra))\n",
            "            row.history.pop(0)\n",
        ),
        ("a mask that allows something is no mask", "(masks != -1).any(axis=1)", "(masks != -1).all(axis=1)"),
        (
            "the tokens of several parts stay those of the last one",
            "self._latest[: len(logits)].copy_(torch.cat(words))",
            "torch.cat(words)",
        ),
    ),
    *_of(
        "kernels/matmul/finish_kernel.py",
        "tests/kernels/test_matmul.py::test_the_norm_of_a_row_depends_on_no_other",
        ("all blocks of rows have the lengths of the first", "(inverse_lengths(sums[tt]", "(inverse_lengths(sums[0]"),
    ),
    *_of(
        "kernels/matmul/finish_kernel.py",
        "tests/kernels/test_matmul.py::test_lengths_of_rows_of_more_columns_than_a_program_adds_at_once",
        (
            "rows of more than 4,096 columns are added up from their first ones",
            "PARTS + start + at, mask",
            "PARTS + at, mask",
        ),
        (
            "only the first 4,096 columns of a row are added up",
            "tl.static_range(0, PARTS, BLOCK)",
            "tl.static_range(0, BLOCK, BLOCK)",
        ),
    ),
    *_of(
        "kernels/matmul/kernel.py",
        "tests/kernels/test_matmul.py::test_a_product_and_the_norm_of_its_rows",
        ("all tiles have the residual of the first", "y += added[tt * MT + mt]", "y += added[tt * MT]"),
        ("all tiles are scaled as the first", "(y * factors[mt])", "(y * factors[0])"),
        ("with parts of K, all squares go to the first columns", "part = tl.program_id(0) * (BLOCK // 16) +", "part ="),
    ),
    *_of(
        "kernels/head_gate/kernel.py",
        "tests/kernels/test_delta.py -kone_gate",
        ("each row has the gate of the first one", "gate_ptr + row * gate_row)", "gate_ptr)"),
    ),
    *_of(
        "models/decoder.py",
        "tests/models/test_architectures.py -kbfloat16",
        (
            "the norm behind experts is taken to be done",
            "isinstance(layer.feed, FeedForward)), behind)",
            "True), behind)",
        ),
    ),
    *_of(
        "kernels/matmul/kernel.py",
        "tests/kernels/test_matmul.py -kasked_for",
        (
            "a product goes to new memory, not where it is asked for",
            "gate, lengths, out_dtype, out=out)",
            "gate, lengths, out_dtype)",
        ),
    ),
    *_of(
        "edgelm/backends/torch/batch.py",
        "tests/backends/torch/test_device.py -konly_the_device_knows",
        ("a step ahead takes the token of another row", "ids.append(-1 - last_rows[chunk.seq.id])", "ids.append(-1)"),
    ),
    *_of(
        "kernels/attention/decode_kernel.py",
        "tests/kernels/test_attention.py -kare_attention",
        ("the warps of a chunk are added up as they are", "tl.sum(total * weight, 0)", "tl.sum(total, 0)"),
        ("the rows of all sequences in one place of the scratch", "slot = before % MANY_ROWS", "slot = 0"),
    ),
    *_of(
        "kernels/attention/decode_kernel.py",
        "tests/kernels/test_attention.py -kkernels_are_attention",
        (
            "a window sees one position more",
            "key_at > position[None, :, None] - window",
            "key_at >= position[None, :, None] - window",
        ),
        ("a sink of another size than the weights", "* LOG2E, 2.0**SHIFT", "* LOG2E, 1.0"),
    ),
    *_of(
        "kernels/attention/operands.py",
        "tests/kernels/test_attention.py -kknows_nothing",
        (
            "values that a row does not see may be NaN",
            'return tl.where(tl.abs(values) < float("inf"), values, 0.0)',
            "return values",
        ),
    ),
    *_of(
        "kernels/attention/operands.py",
        "tests/kernels/test_attention.py -kbeyond_the_most",
        ("rows beyond the most that there may be", "tl.minimum(count, max_query_len)", "count"),
    ),
    *_of(
        "kernels/attention/decode_kernel.py",
        "tests/kernels/test_attention.py -kseveral_turns",
        ("a program that leaves out every second turn", "item += ahead", "item += 2 * programs"),
    ),
    *_of(
        "kernels/attention/operands.py",
        "tests/kernels/test_attention.py -kkernels_are_attention",
        (
            "the sums of two groups in each other's place",
            "tl.join(sums[FIRST] * weight, sums[FIRST + 1] * weight)",
            "tl.join(sums[FIRST + 1] * weight, sums[FIRST] * weight)",
        ),
    ),
    *_of(
        "kernels/attention/operands.py",
        "tests/kernels/test_attention.py -kare_attention",
        (
            "the owner of a work item without the sequences before it",
            "tl.arange(0, MAX_SEQS) + 1",
            "tl.arange(0, MAX_SEQS)",
        ),
    ),
    *_of(
        "kernels/attention/prefill_kernel.py",
        "tests/kernels/test_attention.py -kprompts_on_a_long",
        (
            "parts of a context that overlap",
            "begin = begin + split * part_len",
            "begin = begin + split * (part_len - 1)",
        ),
    ),
    *_of(
        "kernels/attention/prefill_kernel.py",
        "tests/kernels/test_attention.py -kkernels_are_attention",
        (
            "a row of a prompt does not see itself",
            "seen = key_at[None, :] <= position[:, None]",
            "seen = key_at[None, :] < position[:, None]",
        ),
    ),
    *_of(
        "kernels/attention/launch.py",
        "tests/kernels/test_attention.py -kless_scratch",
        (
            "later sequences with the rows of the first",
            "query_start_loc[begin : end + 1]",
            "query_start_loc[: end + 1]",
        ),
    ),
]
