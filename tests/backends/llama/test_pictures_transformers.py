"""A picture of Gemma 3 beside transformers, on the same random weights: the same tokens and log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from edgelm.base.workers.pictures import decode_picture
from edgelm.jobs.request import AnswerRequest
from tests.seeing import EYE_FFN, EYE_HEADS, EYE_LAYERS, EYE_WIDTH, LAYERS, PATCH, SIDE, WINDOW, png, write_pair
from tests.seeing_model import asking, picture, require_libmtmd, seeing

require_libmtmd()
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FLOOR = 0.02  # log-probabilities: keys and values of 16 bits here, of 32 there
MARK = 0  # the token of a picture over there: the prompt has no other use of it
OF_LAYER = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
OF_EYE = OF_LAYER | {
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
OF_TEXT = OF_LAYER | {
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


async def test_gemma3_reads_a_picture_as_transformers_does(tmp_path: Path) -> None:
    model_path, projector_path = write_pair(tmp_path, "gemma3")
    question = asking("What is this? ", picture(SIDE, SIDE, 1), " say it")
    async with seeing(model_path) as model:
        prepared = await model.answerer.prepare(AnswerRequest(messages=[question]))
        answer = await model.ask(question, num_logprobs=20)
    prompt = [MARK if token < 0 else token for token in prepared.ids]
    assert prompt.count(MARK) == 16
    pixels = np.frombuffer(decode_picture(png(SIDE, SIDE, 1)).rgb, np.uint8).reshape(1, SIDE, SIDE, 3)
    tokens = torch.tensor([prompt + answer.ids[:-1]])
    with torch.no_grad():
        logits = reference(tensors(model_path), tensors(projector_path))(
            input_ids=tokens,
            pixel_values=torch.tensor(pixels / 127.5 - 1, dtype=torch.float32).permute(0, 3, 1, 2),
            token_type_ids=(tokens == MARK).long(),
        ).logits[0]
    rows = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 :]
    assert [int(row.argmax()) for row in rows] == answer.ids
    for row, top in zip(rows, answer.tops, strict=True):
        assert max(abs(float(row[token]) - logprob) for token, logprob in top.items()) < FLOOR


def tensors(path: Path) -> dict[str, Any]:
    return {
        tensor.name: torch.tensor(np.array(tensor.data, np.float32)).reshape([int(n) for n in tensor.shape[::-1]])
        for tensor in GGUFReader(path).tensors
    }


def reference(text: dict[str, Any], eyes: dict[str, Any]) -> Any:
    """Return transformers' model with these weights."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    layers = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(LAYERS)]
    vocab, width = text["token_embd.weight"].shape
    config = transformers.Gemma3Config(
        text_config={
            "vocab_size": vocab,
            "hidden_size": width,
            "intermediate_size": text["blk.0.ffn_up.weight"].shape[0],
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": WINDOW,
            "layer_types": layers,
            "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), rope),
            "pad_token_id": 3,
        },
        vision_config={
            "hidden_size": EYE_WIDTH,
            "intermediate_size": EYE_FFN,
            "num_hidden_layers": EYE_LAYERS,
            "num_attention_heads": EYE_HEADS,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        mm_tokens_per_image=16,
        image_token_index=MARK,
        tie_word_embeddings=False,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    names = list(model.state_dict())

    def place_of(end: str) -> str:
        (name,) = (name for name in names if name.endswith(end))
        return str(name.removesuffix(end))

    eye, body = place_of("embeddings.patch_embedding.weight"), place_of("embed_tokens.weight")
    joint = place_of("mm_input_projection_weight")
    weights = {
        f"{eye}embeddings.patch_embedding.weight": eyes["v.patch_embd.weight"],
        f"{eye}embeddings.patch_embedding.bias": eyes["v.patch_embd.bias"],
        f"{eye}embeddings.position_embedding.weight": eyes["v.position_embd.weight"],
        f"{joint}mm_input_projection_weight": eyes["mm.input_projection.weight"],
        f"{joint}mm_soft_emb_norm.weight": eyes["mm.soft_emb_norm.weight"] - 1,  # a GGUF has it with the one
        f"{body}embed_tokens.weight": text["token_embd.weight"],
        f"{body}norm.weight": text["output_norm.weight"] - 1,
        "lm_head.weight": text["output.weight"],
    }
    for part in ("weight", "bias"):
        weights[f"{eye}post_layernorm.{part}"] = eyes[f"v.post_ln.{part}"]
        for layer in range(EYE_LAYERS):
            for name, theirs in OF_EYE.items():
                weights[f"{eye}encoder.layers.{layer}.{theirs}.{part}"] = eyes[f"v.blk.{layer}.{name}.{part}"]
    for layer in range(LAYERS):
        for name, theirs in OF_TEXT.items():
            weights[f"{body}layers.{layer}.{theirs}.weight"] = text[f"blk.{layer}.{name}.weight"] - int("norm" in name)
    missing, strange = model.load_state_dict(weights, strict=False)
    assert not strange
    assert all(".head." in name for name in missing), missing  # which Gemma 3 does not use
    return model
