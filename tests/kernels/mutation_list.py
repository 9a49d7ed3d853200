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


LAYOUT, UNPACK, STEP = "kernels/layout.py", "kernels/unpack.py", "kernels/matmul/step_kernel.py"
SCALES, OPERANDS, FINISH = (f"kernels/matmul/{name}.py" for name in ("scales", "operands", "finish_kernel"))
MATMUL, DEQUANTIZE, PACKED = "kernels/matmul/kernel.py", "kernels/dequantize/kernel.py", "models/loading/packed.py"
OF_LAYOUT, OF_MATMUL, OF_UNPACK = (f"tests/kernels/test_{name}.py" for name in ("layout", "matmul", "unpack"))
OF_DEQUANTIZE, OF_PACKED = "tests/kernels/test_dequantize.py", "tests/models/loading/test_sources.py"
NORM, ACTIVATION, ROUTE = (f"kernels/{name}/kernel.py" for name in ("norm", "activation", "route"))
ROTATION, WRITE_KV, CACHE = "kernels/rope.py", "kernels/write_kv/kernel.py", "kernels/cache/kernel.py"
SAMPLING, DRAW = "kernels/sampling/kernel.py", "kernels/sampling/draw_kernel.py"
DEVICE = "edgelm/backends/torch/sampler.py"
OF_NORM, OF_ROUTE, OF_CACHE, OF_ROTATION, OF_WRITE_KV, OF_SAMPLING = (
    f"tests/kernels/test_{name}.py" for name in ("norm", "route", "cache", "rope", "write_kv", "sampling")
)
OF_ACTIVATION, OF_DEVICE = "tests/kernels/test_activation.py", "tests/backends/torch/test_sampler.py"
GEMM, GROUPED, EMBEDDING = (f"kernels/{name}/kernel.py" for name in ("dequant_gemm", "grouped", "embedding"))
GGML, FOLDER = "models/loading/stored.py", "models/loading/quantized_folder.py"
OF_GROUPED, OF_EMBEDDING = "tests/kernels/test_grouped.py", "tests/kernels/test_embedding.py"
OF_GGML, OF_FOLDER = "tests/models/loading/test_stored.py", "tests/models/loading/test_quantized_folder.py"
OF_ATTENTION = "tests/kernels/test_attention.py"
DELTA, OF_DELTA = "kernels/delta/kernel.py", "tests/kernels/test_delta.py"

MUTATIONS = [
    Mutation(
        LAYOUT,
        "nibbles of a word in the wrong order",
        "low = _join(nibbles, torch.arange(0, 32, 4))",
        "low = _join(nibbles, torch.arange(28, -4, -4))",
        OF_LAYOUT,
    ),
    Mutation(
        LAYOUT,
        "scales one group too far",
        "scale = _scale_values(weight).repeat_interleave(",
        "scale = _scale_values(weight).roll(1, -1).repeat_interleave(",
        OF_LAYOUT,
    ),
    Mutation(
        LAYOUT,
        "minimums with the factor of the scales",
        "return _super_values(weight, 1) * mins",
        "return _super_values(weight, 0) * mins",
        OF_LAYOUT,
    ),
    Mutation(LAYOUT, "up before gate", "torch.stack(parts, dim + 1)", "torch.stack(parts[::-1], dim + 1)", OF_LAYOUT),
    Mutation(
        UNPACK,
        "halves of a word exchanged",
        "code = (words >> (4 * SLOT + 16 * H)) & 15",
        "code = (words >> (4 * SLOT + 16 * (1 - H))) & 15",
        OF_DEQUANTIZE,
    ),
    Mutation(
        UNPACK,
        "a fifth bit from the slot beside",
        "((high >> (SLOT + 16 * H)) & 1)",
        "((high >> ((SLOT ^ 1) + 16 * H)) & 1)",
        OF_DEQUANTIZE,
    ),
    Mutation(
        UNPACK, "assembly: a slot too far", "shift = 4 * slot - at", "shift = 4 * slot - at + 4 * (slot > 2)", OF_UNPACK
    ),
    Mutation(
        UNPACK,
        "assembly: the second pair of bytes is the first",
        "{(0x4140, 0x4342)[p]:#x}",
        "{(0x4140, 0x4140)[p]:#x}",
        OF_UNPACK,
    ),
    Mutation(
        UNPACK, "assembly: e4m3 without its sign", "lop3.b32 h, t, 0x80008000,", "lop3.b32 h, t, 0x00008000,", OF_UNPACK
    ),
    Mutation(
        UNPACK,
        "x in another order than the weight",
        "x = tl.permute(x, [0, 3, 4, 2, 5, 1] if KW == 2",
        "x = tl.permute(x, [0, 4, 3, 2, 5, 1] if KW == 2",
        OF_MATMUL,
    ),
    Mutation(
        DEQUANTIZE,
        "no mask of the columns",
        "inside = (row < rows)[:, None] & (column < columns)[None, :]",
        "inside = (row < rows)[:, None] & (column >= 0)[None, :]",
        OF_DEQUANTIZE,
    ),
    Mutation(
        DEQUANTIZE,
        "scales of the first group for all",
        "PER + (index if GROUP < 64 else 0)",
        "PER + 0 * (index if GROUP < 64 else 0)",
        OF_DEQUANTIZE,
    ),
    Mutation(
        SCALES,
        "padding multiplies with its garbage",
        "out += (tl.where(columns + i * GROUP < K, value, 0.0)",
        "out += (tl.where(columns < K, value, 0.0)",
        OF_MATMUL,
    ),
    Mutation(
        STEP,
        "scale and minimum exchanged",
        'offset = times(offset, scale_number(word, 1, "f16"))',
        'offset = times(offset, scale_number(word, 0, "f16"))',
        OF_MATMUL,
    ),
    Mutation(
        MATMUL,
        "a part of K is left out",
        "last = tl.minimum(first + EACH, EVEN)",
        "last = tl.minimum(first + EACH, EVEN - 2)",
        OF_MATMUL,
    ),
    Mutation(
        MATMUL,
        "a step ahead is loaded twice",
        "pid, tl.minimum(step + 3, end)",
        "pid, tl.minimum(step + 2, end)",
        OF_MATMUL + "::test_prefetching_and_tiles_change_no_bit",
    ),
    Mutation(MATMUL, "the last split is dropped", "tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)", OF_MATMUL),
    Mutation(
        PACKED,
        "every slice is put at the beginning",
        "tiles = slice(first_row // TILE, (first_row + rows + short) // TILE)",
        "tiles = slice(0, (rows + short) // TILE)",
        OF_PACKED,
    ),
    Mutation(
        PACKED,
        "a stack has one matrix",
        "return plane[matrix] if self._stacked else plane",
        "return plane[0] if self._stacked else plane",
        OF_PACKED,
    ),
    Mutation(
        DEQUANTIZE,
        "the factor of another 256 columns",
        "entry = tile * (chunks // 4) + chunk // 4",
        "entry = tile * (chunks // 4) + chunk // 8",
        OF_DEQUANTIZE,
    ),
    Mutation(
        EMBEDDING,
        "upper bits of the wrong row",
        "shift = 2 * (s + 4 * rb) + 16 * h",
        "shift = 2 * (s + 2 * rb) + 16 * h",
        OF_EMBEDDING,
    ),
    Mutation(
        GROUPED,
        "experts summed from the last to the first",
        "for j in tl.static_range(K):",
        "for j in tl.static_range(K - 1, -1, -1):",
        OF_GROUPED,
    ),
    Mutation(
        OPERANDS,
        "matrices of a stack without their stride",
        "return plane.flatten(-2).view(",
        "return plane.view(-1).view(",
        OF_GROUPED,
    ),
    Mutation(
        GGML,
        "high nibbles first",
        "torch.cat((packed & 15, packed >> 4), -1)",
        "torch.cat((packed >> 4, packed & 15), -1)",
        OF_GGML,
    ),
    Mutation(
        FOLDER,
        "AWQ's nibbles in the inverse order",
        "AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)",
        "AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)",
        OF_FOLDER + "::test_quantized_experts_become_one_stack",
    ),
    Mutation(
        FOLDER,
        "GPTQ's zero points one too small",
        "if self._zero_less_one:",
        "if not self._zero_less_one:",
        OF_FOLDER + "::test_experts_have_their_columns_in_orders_of_their_own",
    ),
    Mutation(
        STEP, "the zero is added", "t = tl.fma(-o,", "t = tl.fma(o,", OF_MATMUL + "::test_every_format_equals_float64"
    ),
    Mutation(
        STEP,
        "the scale of the next group",
        "s = tl.broadcast_to(scale[i][:, :, None]",
        "s = tl.broadcast_to(scale[(i + 1) % GROUPS][:, :, None]",
        OF_MATMUL + "::test_every_format_equals_float64",
    ),
    Mutation(
        MATMUL,
        "up with the bias of gate",
        "with_bias(up, bias, at + 16, N)",
        "with_bias(up, bias, at, N)",
        OF_MATMUL + "::test_lengths_bias_gate_and_residual",
    ),
    Mutation(
        FINISH,
        "all rows have the residual of the first",
        "row.to(tl.int64) * residual_stride",
        "row.to(tl.int64) * 0",
        OF_MATMUL + "::test_lengths_bias_gate_and_residual",
    ),
    Mutation(
        MATMUL,
        "every program multiplies the first rows",
        "x += first_row.to(tl.int64) * x_stride",
        "x += first_row.to(tl.int64) * 0",
        OF_MATMUL + "::test_every_format_has_the_same_bits_for_any_number_of_rows",
    ),
    Mutation(
        GEMM,
        "the row of another pair",
        "row = tl.load(order + first + index,",
        "row = tl.load(order + first + index * 0,",
        OF_GROUPED,
    ),
    Mutation(
        NORM,
        "the residual is forgotten",
        "return (tl.load(residual_ptr + at, inside, other=0.0) + x) * sum_scale",
        "return x * sum_scale",
        OF_NORM,
    ),
    Mutation(ACTIVATION, "up is limited from above only", "tl.where(up < -LIMIT, -LIMIT, up)", "up", OF_ACTIVATION),
    Mutation(
        ACTIVATION, "up is read one column too far", "up_at = width + at", "up_at = width + at + 1", OF_ACTIVATION
    ),
    Mutation(ROUTE, "of equal scores the higher id comes first", "(0x7FFFFFFF - expert)", "expert", OF_ROUTE),
    Mutation(DELTA, "a state is moved over drafts, too", "if at + 1 == goal:", "if at + 1 == end:", OF_DELTA),
    Mutation(
        DELTA,
        "inputs before the step are not read",
        "is_kept = (position < start)",
        "is_kept = (position < 0)",
        OF_DELTA,
    ),
    Mutation(DELTA, "tokens of a chunk do not correct each other", "range(CHUNK - 1)", "range(0)", OF_DELTA),
    Mutation(ROTATION, "a term of the cosine is missing", "for n in range(6)", "for n in range(4)", OF_ROTATION),
    Mutation(
        ROTATION,
        "angles of float32",
        "turns = self.frequencies.double() / (2 * pi)",
        "turns = (self.frequencies / (2 * pi)).double()",
        OF_ROTATION,
    ),
    Mutation(WRITE_KV, "interleaved dimensions without their partners", "partner = d ^ 1", "partner = d", OF_WRITE_KV),
    Mutation(
        WRITE_KV,
        "queries grow by the factor of the span before",
        "tl.minimum(position // span, last_span)",
        "tl.maximum(tl.minimum(position // span, last_span) - 1, 0)",
        OF_WRITE_KV,
    ),
    Mutation(
        WRITE_KV,
        "the padding of a last pair of groups is stored",
        "codes = tl.where(tl.arange(0, P)[None, :] < WIDTH, codes, 0)",
        "codes = codes",
        OF_WRITE_KV,
    ),
    Mutation(
        CACHE,
        "the rotation in another order",
        "x = _butterfly(x, 16 >> step, ROWS, P)",
        "x = _butterfly(x, 1 << step, ROWS, P)",
        OF_WRITE_KV,
    ),
    Mutation(CACHE, "e4m3: halves are rounded up", "+ ((size >> 20) & 1)", "+ 1", OF_WRITE_KV),
    Mutation(
        "kernels/cache/order.py",
        "tokens of nibbles in the order of bytes",
        "2 * h + jb if nibbles",
        "2 * jb + h if nibbles",
        OF_CACHE,
    ),
    Mutation(
        CACHE,
        "e4m3: the smallest normal numbers are taken for denormal ones",
        "tl.abs(x) < 0.015625",
        "tl.abs(x) < 0.0078125",
        OF_WRITE_KV,
    ),
    Mutation(
        CACHE,
        "4 bits: of two largest values the negative one",
        "tl.where(high >= low, high, -low) * (-1 / 8)",
        "tl.where(high > low, high, -low) * (-1 / 8)",
        OF_WRITE_KV,
    ),
    Mutation(
        DRAW,
        "top_p keeps what twice its weight would",
        "            if weight_at > bound:",
        "            if weight_at > bound * 2:",
        OF_SAMPLING,
    ),
    Mutation(
        DRAW,
        "of few tokens top_p keeps one less",
        "(weight_above <= tl.maximum",
        "(weight_above < tl.maximum",
        OF_SAMPLING,
    ),
    Mutation(
        DRAW,
        "of few tokens the draw counts those that top_p removed",
        "& (other >= low)[None, :]",
        "& (other > LEAST)[None, :]",
        OF_SAMPLING,
    ),
    Mutation(
        DRAW,
        "a chunk's draw forgets the chunks before",
        "(inside <= target - before)",
        "(inside <= target)",
        OF_SAMPLING,
    ),
    Mutation(
        DEVICE,
        "draft tokens stay in the history",
        "            row.history.pop(len(row.extra))\n",
        "            row.history.pop(0)\n",
        OF_DEVICE,
    ),
    Mutation(
        DEVICE,
        "a mask that allows something is no mask",
        "(masks != -1).any(axis=1)",
        "(masks != -1).all(axis=1)",
        OF_DEVICE,
    ),
    Mutation(
        MATMUL,
        "a product is not divided by the length of its row",
        "y *= lengths[tt]",
        "y *= 1.0",
        f"{OF_MATMUL}::test_lengths_bias_gate_and_residual",
    ),
    Mutation(
        FINISH,
        "all blocks of rows have the lengths of the first",
        "(inverse_lengths(sums[tt]",
        "(inverse_lengths(sums[0]",
        f"{OF_MATMUL}::test_the_norm_of_a_row_depends_on_no_other",
    ),
    Mutation(
        FINISH,
        "rows of more than 4,096 columns are added up from their first ones",
        "PARTS + start + at, mask",
        "PARTS + at, mask",
        f"{OF_MATMUL}::test_lengths_of_rows_of_more_columns_than_a_program_adds_at_once",
    ),
    Mutation(
        FINISH,
        "only the first 4,096 columns of a row are added up",
        "tl.static_range(0, PARTS, BLOCK)",
        "tl.static_range(0, BLOCK, BLOCK)",
        f"{OF_MATMUL}::test_lengths_of_rows_of_more_columns_than_a_program_adds_at_once",
    ),
    Mutation(
        MATMUL,
        "all tiles have the residual of the first",
        "y += added[tt * MT + mt]",
        "y += added[tt * MT]",
        f"{OF_MATMUL}::test_a_product_and_the_norm_of_its_rows",
    ),
    Mutation(
        MATMUL,
        "all tiles are scaled as the first",
        "(y * factors[mt])",
        "(y * factors[0])",
        f"{OF_MATMUL}::test_a_product_and_the_norm_of_its_rows",
    ),
    Mutation(
        MATMUL,
        "with parts of K, all squares go to the first columns",
        "part = tl.program_id(0) * (BLOCK // 16) +",
        "part =",
        f"{OF_MATMUL}::test_a_product_and_the_norm_of_its_rows",
    ),
    Mutation(
        "kernels/head_gate/kernel.py",
        "each row has the gate of the first one",
        "gate_ptr + row * gate_row)",
        "gate_ptr)",
        f"{OF_DELTA} -kone_gate",
    ),
    Mutation(
        "models/decoder.py",
        "the norm behind experts is taken to be done",
        "isinstance(layer.feed, FeedForward)), behind)",
        "True), behind)",
        "tests/models/test_architectures.py -kbfloat16",
    ),
    Mutation(
        MATMUL,
        "a product goes to new memory, not where it is asked for",
        "gate, lengths, out_dtype, out=out)",
        "gate, lengths, out_dtype)",
        f"{OF_MATMUL} -kasked_for",
    ),
    Mutation(
        EMBEDDING,
        "a token that the device knows is that of the row before",
        "place = -1 - row",
        "place = tl.maximum(-2 - row, 0)",
        OF_EMBEDDING,
    ),
    Mutation(
        EMBEDDING,
        "no token that the device knows is read as row -1",
        "tl.maximum(tl.load(last + place * last_stride, mask=named, other=0), 0)",
        "tl.load(last + place * last_stride, mask=named, other=0)",
        OF_EMBEDDING,
    ),
    Mutation(
        DEVICE,
        "the tokens of several parts stay those of the last one",
        "self._latest[: len(logits)].copy_(torch.cat(words))",
        "torch.cat(words)",
        OF_DEVICE,
    ),
    Mutation(
        "edgelm/backends/torch/batch.py",
        "a step ahead takes the token of another row",
        "ids.append(-1 - last_rows[chunk.seq.id])",
        "ids.append(-1)",
        "tests/backends/torch/test_device.py -konly_the_device_knows",
    ),
    Mutation(
        "kernels/attention/decode_kernel.py",
        "the warps of a chunk are added up as they are",
        "tl.sum(total * weight, 0)",
        "tl.sum(total, 0)",
        f"{OF_ATTENTION} -kare_attention",
    ),
    Mutation(
        "kernels/attention/decode_kernel.py",
        "a window sees one position more",
        "key_at > position[None, :, None] - window",
        "key_at >= position[None, :, None] - window",
        f"{OF_ATTENTION} -kkernels_are_attention",
    ),
    Mutation(
        "kernels/attention/decode_kernel.py",
        "a sink of another size than the weights",
        "* LOG2E, 2.0**SHIFT",
        "* LOG2E, 1.0",
        f"{OF_ATTENTION} -kkernels_are_attention",
    ),
    Mutation(
        "kernels/attention/operands.py",
        "values that a row does not see may be NaN",
        'return tl.where(tl.abs(values) < float("inf"), values, 0.0)',
        "return values",
        f"{OF_ATTENTION} -kknows_nothing",
    ),
    Mutation(
        "kernels/attention/operands.py",
        "rows beyond the most that there may be",
        "tl.minimum(count, max_query_len)",
        "count",
        f"{OF_ATTENTION} -kbeyond_the_most",
    ),
    Mutation(
        "kernels/attention/decode_kernel.py",
        "the rows of all sequences in one place of the scratch",
        "slot = before % MANY_ROWS",
        "slot = 0",
        f"{OF_ATTENTION} -kare_attention",
    ),
    Mutation(
        "kernels/attention/decode_kernel.py",
        "a program that leaves out every second turn",
        "item += ahead",
        "item += 2 * programs",
        f"{OF_ATTENTION} -kseveral_turns",
    ),
    Mutation(
        "kernels/attention/operands.py",
        "the sums of two groups in each other's place",
        "tl.join(sums[FIRST] * weight, sums[FIRST + 1] * weight)",
        "tl.join(sums[FIRST + 1] * weight, sums[FIRST] * weight)",
        f"{OF_ATTENTION} -kkernels_are_attention",
    ),
    Mutation(
        "kernels/attention/operands.py",
        "the owner of a work item without the sequences before it",
        "tl.arange(0, MAX_SEQS) + 1",
        "tl.arange(0, MAX_SEQS)",
        f"{OF_ATTENTION} -kare_attention",
    ),
    Mutation(
        "kernels/attention/prefill_kernel.py",
        "parts of a context that overlap",
        "begin = begin + split * part_len",
        "begin = begin + split * (part_len - 1)",
        f"{OF_ATTENTION} -kprompts_on_a_long",
    ),
    Mutation(
        "kernels/attention/prefill_kernel.py",
        "a row of a prompt does not see itself",
        "seen = key_at[None, :] <= position[:, None]",
        "seen = key_at[None, :] < position[:, None]",
        f"{OF_ATTENTION} -kkernels_are_attention",
    ),
    Mutation(
        "kernels/attention/launch.py",
        "later sequences with the rows of the first",
        "query_start_loc[begin : end + 1]",
        "query_start_loc[: end + 1]",
        f"{OF_ATTENTION} -kless_scratch",
    ),
]
