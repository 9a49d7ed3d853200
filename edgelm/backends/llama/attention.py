"""Asks a device of llama.cpp whether it has a kernel for the attention of a model, in each KV mode.

llama.cpp gives an op that a device has no kernel for to the processor, without a word: for each token, keys and values
are copied there from the device. Which types and sizes of heads a backend takes depends on its release and on how it
was compiled, so the backend itself is asked, about an op that is never computed.

Owns that op: flash attention, of which the KV modes with quantized values need a kernel. Attention without it is matrix
products, which every backend has for all our modes.
"""

from __future__ import annotations

import ctypes

from edgelm.backends.llama.api import Arena, native_function
from edgelm.backends.llama.memory import CELLS, head_refusal, kv_types
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.checkpoints.summary import ModelSummary

F32, F16 = 0, 1  # of enum ggml_type
ARENA_BYTES = 2**14  # three times the descriptions of fourteen tensors: ggml aborts where there is no room
BATCHES = 1, 64  # tokens: the kernels for one may be others than those for many

_pointer, _int, _size, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_init = native_function("ggml_init", _pointer, Arena)
_free = native_function("ggml_free", None, _pointer)
_tensor = native_function("ggml_new_tensor_3d", _pointer, _pointer, _int, _size, _size, _size)
_permuted = native_function("ggml_permute", _pointer, _pointer, _pointer, _int, _int, _int, _int)
_add_sinks = native_function("ggml_flash_attn_ext_add_sinks", None, _pointer, _pointer)
_attention = native_function("ggml_flash_attn_ext", _pointer, *[_pointer] * 5, _float, _float, _float)
supports_op = native_function("ggml_backend_dev_supports_op", ctypes.c_bool, _pointer, _pointer)


def slow_modes(device: int, model: ModelSummary) -> tuple[str, ...]:
    """Return the KV modes of a model whose attention this device leaves to the processor; `device` is its handle."""
    layers = sorted(set(zip(model.kv_heads, model.key_lens, model.value_lens, strict=True)))
    layers = [layer for layer in layers if all(layer)]  # latent attention: a header does not tell the sizes of its op
    flash = [kv for kv, mode in LLAMA_KV.items() if mode.flash]
    return tuple(kv for kv in flash if not all(_attends(device, kv, model, *layer) for layer in layers))


def _attends(device: int, kv: str, model: ModelSummary, kv_heads: int, key_len: int, value_len: int) -> bool:
    """Return whether a device has a kernel for the attention of such heads; also where no cache can have them."""
    if head_refusal(kv, key_len, value_len):
        return True  # the plan refuses the mode; ggml aborts on such a tensor
    key_type, value_type = kv_types(kv)
    grouped = kv_heads * max(model.heads // kv_heads, 1)  # a layer may have fewer than the model has at most
    arena = _init(Arena(ARENA_BYTES, None, no_data=True))
    try:
        keys = _permuted(arena, _tensor(arena, key_type.id, key_len, kv_heads, CELLS), 0, 2, 1, 3)
        values = _permuted(arena, _tensor(arena, value_type.id, value_len, kv_heads, CELLS), 0, 2, 1, 3)
        for batch in BATCHES:
            queries = _permuted(arena, _tensor(arena, F32, key_len, grouped, batch), 0, 2, 1, 3)
            mask = _tensor(arena, F16, CELLS, batch, 1)
            scores = key_len**-0.5, 0.0, model.attention_softcap
            attention = _attention(arena, queries, keys, values, mask, *scores)
            if model.attention_sinks:
                _add_sinks(attention, _tensor(arena, F32, grouped, 1, 1))
            if not supports_op(device, attention):
                return False
        return True
    finally:
        _free(arena)
