"""Writes tiny pairs of random weights: a model and the projector that lets it see, of three kinds.

    gemma3    a picture has 16 tokens that attend to each other; half of the layers have a sliding window
    qwen3vl   a picture has tokens by its size, rows and columns as positions (M-RoPE), and vectors for a deeper layer
    idefics3  a picture is cut into tiles, with tokens of text between them (SmolVLM)
    qwen35    positions as of qwen3vl; recurrent layers, and a head that predicts the token after the next one

Owns their shapes. The vocabulary is that of `tests.tiny`. Knows nothing of edgelm.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tests.odd_models import (
    HEAD,
    KV_HEADS,
    VOCAB,
    WIDTH,
    _attention,
    _attention_tensors,
    _feed_forward,
    _weights,
    write_odd,
)
from tests.tiny import Tiny, _write_tokenizer, vocabulary

Kind = Literal["gemma3", "qwen3vl", "idefics3", "qwen35"]
KINDS: tuple[Kind, ...] = ("gemma3", "qwen3vl", "idefics3")
LAYERS, WINDOW = 6, 32
EYE_WIDTH, EYE_HEADS, EYE_FFN, EYE_LAYERS = 32, 2, 64, 2
SIDE, PATCH, MERGE = 128, 16, 2
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_AROUND: dict[Kind, tuple[str, ...]] = {
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    "qwen3vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen35": ("<|vision_start|>", "<|vision_end|>"),
    "idefics3": (
        "\n\n",
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{r}_col_{c}>" for r in "123" for c in "123"),
    ),
}
_ARCH: dict[Kind, str] = {"gemma3": "gemma3", "qwen3vl": "qwen3vl", "idefics3": "llama"}
_PROJECTOR: dict[Kind, str] = {
    "gemma3": "gemma3",
    "qwen3vl": "qwen3vl_merger",
    "idefics3": "idefics3",
    "qwen35": "qwen3vl_merger",
}


def write_pair(folder: Path, kind: Kind, seed: int = 0, template: str = TEMPLATE) -> tuple[Path, Path]:
    """Write a model and its projector into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    model, projector = folder / f"tiny-{kind}.gguf", folder / f"mmproj-tiny-{kind}.gguf"
    if kind == "qwen35":
        write_odd(model, "qwen35", seed, heads=0.0, tiny=_tiny(kind, template))
    else:
        _write_model(model, kind, seed, template)
    _write_projector(projector, kind, seed)
    return model, projector


def _tiny(kind: Kind, template: str) -> Tiny:
    return Tiny(vocab_size=VOCAB, chat_template=template, control=("<|im_start|>", "<|im_end|>", *_AROUND[kind]))


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a picture of random blocks of colour as a PNG file."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
    return encode_png(blocks[rows][:, columns])


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels as a PNG file: [height, width, 3]."""
    height, width, _ = pixels.shape
    data = b"".join(b"\0" + row.tobytes() for row in pixels)
    out = io.BytesIO(b"")
    out.write(b"\x89PNG\r\n\x1a\n")
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b"")):
        out.write(struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)))
    return out.getvalue()


def _write_model(path: Path, kind: Kind, seed: int, template: str) -> None:
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, _ARCH[kind])
    tiny = _tiny(kind, template)
    writer.add_name(f"tiny {kind}")
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_block_count(LAYERS)
    _write_tokenizer(writer, tiny, [*vocabulary(VOCAB - len(tiny.control)), *tiny.control])
    _attention(writer, KV_HEADS)
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensors |= _attention_tensors(block) | _feed_forward(block)
        if kind == "gemma3":
            tensors |= {f"{block}.post_attention_norm.weight": (WIDTH,), f"{block}.post_ffw_norm.weight": (WIDTH,)}
        if kind == "idefics3":
            for name in ("q", "k"):
                del tensors[f"{block}.attn_{name}_norm.weight"]
    if kind == "gemma3":
        writer.add_sliding_window(WINDOW)
    elif kind == "qwen3vl":
        # as [24, 20, 20] of Qwen3-VL's 64 pairs: they alternate, and pairs beyond 3 times a section would not turn
        writer.add_rope_dimension_sections([6, 5, 5, 0])
        writer.add_uint32("qwen3vl.n_deepstack_layers", 1)
    else:
        writer.add_rope_dimension_count(HEAD)
    tensors |= {"token_embd.weight": (VOCAB, WIDTH), "output.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    _finish(writer, {name: _weights(name, shape, rng) for name, shape in tensors.items()})


def _write_projector(path: Path, kind: Kind, seed: int) -> None:
    rng = np.random.default_rng((seed, 1))
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", _PROJECTOR[kind])
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "embedding_length": EYE_WIDTH,
        "feed_forward_length": EYE_FFN,
        "block_count": EYE_LAYERS,
        "projection_dim": WIDTH,
        "attention.head_count": EYE_HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    merge = "spatial_merge_size" if kind.startswith("qwen") else "projector.scale_factor"
    for name, number in (numbers | {merge: MERGE}).items():
        writer.add_uint32(f"clip.vision.{name}", number)
    if kind == "idefics3":
        writer.add_uint32("clip.vision.preproc_image_size", 2 * SIDE)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    _finish(writer, {name: _eye_weights(name, shape, rng) for name, shape in _eye_tensors(kind).items()})


def _eye_tensors(kind: Kind) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (EYE_WIDTH, 3, PATCH, PATCH),
        "v.patch_embd.bias": (EYE_WIDTH,),
        "v.position_embd.weight": ((SIDE // PATCH) ** 2, EYE_WIDTH),
        **_layer("v.post_ln", EYE_WIDTH),
    }
    for layer in range(EYE_LAYERS):
        block = f"v.blk.{layer}"
        tensors |= _layer(f"{block}.ln1", EYE_WIDTH) | _layer(f"{block}.ln2", EYE_WIDTH)
        tensors |= _linear(f"{block}.attn_out", EYE_WIDTH, EYE_WIDTH)
        tensors |= _linear(f"{block}.ffn_up", EYE_WIDTH, EYE_FFN) | _linear(f"{block}.ffn_down", EYE_FFN, EYE_WIDTH)
        if kind.startswith("qwen"):
            tensors |= _linear(f"{block}.attn_qkv", EYE_WIDTH, 3 * EYE_WIDTH)
        else:
            for name in "qkv":
                tensors |= _linear(f"{block}.attn_{name}", EYE_WIDTH, EYE_WIDTH)
    merged = EYE_WIDTH * MERGE**2
    if kind == "gemma3":
        tensors |= {"mm.input_projection.weight": (EYE_WIDTH, WIDTH), "mm.soft_emb_norm.weight": (EYE_WIDTH,)}
    elif kind == "idefics3":
        tensors["mm.model.fc.weight"] = (WIDTH, merged)
    else:
        tensors["v.patch_embd.weight.1"] = tensors["v.patch_embd.weight"]
        tensors |= _linear("mm.0", merged, merged) | _linear("mm.2", merged, WIDTH)
    if kind == "qwen3vl":
        tensors |= _layer("v.deepstack.0.norm", merged)
        tensors |= _linear("v.deepstack.0.fc1", merged, merged) | _linear("v.deepstack.0.fc2", merged, WIDTH)
    return tensors


def _linear(name: str, columns: int, rows: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _layer(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _eye_weights(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if name.endswith(".bias"):
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    fan_in = int(np.prod(shape[1:]))
    return (rng.standard_normal(shape) * 1.5 * fan_in**-0.5).astype(np.float32)


def _finish(writer: GGUFWriter, tensors: dict[str, Any]) -> None:
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
