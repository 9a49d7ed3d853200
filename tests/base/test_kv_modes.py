"""The table of KV modes agrees with the caches of both engines."""

from __future__ import annotations

import pytest

from edgelm.backends.llama.memory import kv_types
from edgelm.base.kv_modes import KV_MODES, LLAMA_KV, TORCH_KV
from edgelm.kernels import cache


def test_the_torch_engine_has_a_cache_for_each_of_its_modes() -> None:
    assert set(TORCH_KV) == set(cache.FORMATS)


@pytest.mark.parametrize("name", TORCH_KV)
def test_the_kernels_store_as_many_bits(name: str) -> None:
    stored = cache.FORMATS[name]
    bits = cache.CODE_BITS[stored.key], cache.CODE_BITS[stored.value]
    assert bits == (TORCH_KV[name].key_bits, TORCH_KV[name].value_bits)


@pytest.mark.parametrize("name", LLAMA_KV)
def test_llama_cpp_stores_as_many_bits_and_a_scale(name: str) -> None:
    mode, types = KV_MODES[name], kv_types(name)
    for bits, stored in zip((mode.key_bits, mode.value_bits), types, strict=True):
        scale = 0 if stored.block_len == 1 else 16
        assert 8 * stored.block_bytes == bits * stored.block_len + scale


def test_values_are_quantized_only_with_flash_attention() -> None:
    assert all(mode.flash == (mode.value_type != "F16") for mode in LLAMA_KV.values())


def test_every_mode_has_an_engine() -> None:
    assert set(LLAMA_KV) | set(TORCH_KV) == set(KV_MODES)
