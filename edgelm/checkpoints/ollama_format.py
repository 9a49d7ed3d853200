"""GGUFs that were made for Ollama's own engine: other architecture names and keys, and the vision tensors inside.

Owns what tells them from those for llama.cpp, which refuses them or computes nonsense. Ollama itself translates them
while it loads them (its llama/compat/README.md has the table). A file that llama.cpp can run must not be taken for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gguf.constants import MODEL_ARCH_NAMES, GGUFValueType

from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import Array

# Ollama's names of architectures, and llama.cpp's of the nearest
RENAMED: Mapping[str, str] = {
    "gptoss": "gpt-oss",
    "glm4moelite": "deepseek2",
    "olmo3": "olmo2",
    "qwen25vl": "qwen2vl",
    "deepseekocr": "deepseek2-ocr",
    "glmocr": "glm4",
    "nemotron_h_omni": "nemotron_h_moe",
    "mllama": "llama",
}
FOREIGN = ("v.", "mm.", "a.", "mtp.", "model.vision_tower.")  # begin the names of tensors that no text model has there
KNOWN = frozenset(MODEL_ARCH_NAMES.values())
M_ROPE_SECTIONS = 4  # Ollama's files have 3, or none


def is_ollamas_own(gguf: GGUF) -> bool:
    """Tell whether a file of a model was made for Ollama's own engine."""
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture == "clip":  # the part that sees, in its own file
        return False
    if architecture in RENAMED and architecture not in KNOWN:
        return True
    if any(name.startswith(FOREIGN) for name in gguf.tensors):
        return True
    is_other = OTHERS.get(architecture)
    return is_other is not None and is_other(gguf)


def num_text_parameters(gguf: GGUF) -> int:
    """Return the number of parameters without the tensors of pictures, sound and heads."""
    return sum(tensor.num_elements for tensor in gguf.tensors.values() if not tensor.name.startswith(FOREIGN))


def _gemma3(gguf: GGUF) -> bool:
    return gguf.values.get("attention.layer_norm_rms_epsilon") is None or "dense.0.weight" in gguf.tensors


def _gemma3n(gguf: GGUF) -> bool:
    whole, per_layer = (gguf.tensors.get(f"{name}.weight") for name in ("token_embd", "per_layer_token_embd"))
    return whole is not None and per_layer is not None and whole.shape[1:] != per_layer.shape[1:]


def _gemma4(gguf: GGUF) -> bool:
    return gguf.metadata.get("tokenizer.ggml.model") == "llama"


def _m_rope(gguf: GGUF) -> bool:
    sections = gguf.values.get("rope.dimension_sections")
    return not isinstance(sections, Array) or len(sections) < M_ROPE_SECTIONS


def _deltas(gguf: GGUF) -> bool:
    return any(name.endswith(".ssm_dt") for name in gguf.tensors)


def _mistral3(gguf: GGUF) -> bool:
    return any(gguf.values.get(f"rope.{key}") is not None for key in ("scaling.beta_fast", "scaling_beta"))


def _lfm2(gguf: GGUF) -> bool:
    return "output_norm.weight" in gguf.tensors and "token_embd_norm.weight" not in gguf.tensors


def _laguna(gguf: GGUF) -> bool:
    return any(name.endswith(".attn_g.weight") for name in gguf.tensors)


def _nemotron(gguf: GGUF) -> bool:
    return any(".ffn_latent_in" in name for name in gguf.tensors)


def _bert(gguf: GGUF) -> bool:
    """Tell whether the map of characters is a list of texts, with which llama.cpp aborts."""
    characters = gguf.metadata.get("tokenizer.ggml.precompiled_charsmap")
    return isinstance(characters, Array) and characters.type == GGUFValueType.STRING


# Architectures that have the same name in both.
OTHERS: Mapping[str, Callable[[GGUF], bool]] = {
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "qwen35": lambda gguf: _m_rope(gguf) or _deltas(gguf),
    "qwen35moe": lambda gguf: _m_rope(gguf) or _deltas(gguf),
    "qwen3vl": _m_rope,
    "qwen3vlmoe": _m_rope,
    "qwen3next": _deltas,
    "mistral3": _mistral3,
    "lfm2": _lfm2,
    "laguna": _laguna,
    "nemotron_h_moe": _nemotron,
    "bert": _bert,
}
