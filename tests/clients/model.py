"""Writes the model that outside programs talk to: long context, tool calls, reasoning, and answers that end soon.

Its next token depends on the last one alone, by a table: the embedding is one-hot, the layer adds nothing, and the
output matrix is the table. So it can be asked with 24,000 tokens on two cores, always calls a tool if it is given tools
and has no result yet, and writes harmless words where a grammar leaves it free (an agent may run `echo`, and nothing
else).

Owns the vocabulary, the table and the template. Knows nothing of edgelm.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType
from numpy.typing import NDArray

from tests.tiny import WORDS

CONTEXT = 65_536
SPACE = "\u2581"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|act|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
MARKS = [*'"{}[]:,.0123456789-', "true", "false", "null"]
STRINGS = ["echo", "hello"]  # of JSON: an agent's command, path or question
THOUGHTS = [SPACE + word for word in ("hmm", "let", "me", "see", "what", "users", "want")]
# What templates begin with: the tools, and all messages.
TEMPLATE_HEAD = """{%- if tools %}
    {{- '<|im_start|>system\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nA call is: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>' ~ message.reasoning_content ~ '</think>' }}{%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- set arguments = call.function.arguments %}
        {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- arguments if arguments is string else arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""
TEMPLATE = (
    TEMPLATE_HEAD
    + """{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if tools and messages[-1].role == 'user' %}{{- '<|act|>' }}
    {%- elif enable_thinking %}{{- '<think>' }}
    {%- endif %}
{%- endif %}"""
)


def write_model(path: Path) -> Path:
    """Write the model, and return its path."""
    texts, kinds = vocabulary()
    return write_table(path, texts, kinds, table(texts), TEMPLATE, CONTEXT)


def write_table(
    path: Path, texts: list[str], kinds: list[TokenType], logits: NDArray[np.float32], template: str, context: int
) -> Path:
    """Write a model that looks its next token up in a table, and return its path."""
    size = len(texts)
    width = -(-size // 32) * 32
    writer = GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0 if kind != TokenType.NORMAL else -float(at) for at, kind in enumerate(kinds)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(texts.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(template)
    _add_weights(writer, logits, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary() -> tuple[list[str], list[TokenType]]:
    """Return the texts and the kinds of all tokens."""
    fixed = ["<unk>", "<s>", "</s>"]
    pieces = [*MARKS, SPACE, *"etaoinshrdlucmfwypvbgkqjxz", *STRINGS]
    pieces += [
        (SPACE + word)[:end] for word in [*WORDS, *(text[1:] for text in THOUGHTS)] for end in range(2, len(word) + 2)
    ]
    pieces = list(dict.fromkeys(pieces))
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED] * (len(SPECIAL) - 3) + [TokenType.NORMAL] * len(pieces)
    return [*fixed, *(f"<0x{byte:02X}>" for byte in range(256)), *SPECIAL, *pieces], kinds


def table(texts: list[str]) -> NDArray[np.float32]:
    """Return the logit of each next token, by the last one: [last, next]."""
    ids = {text: index for index, text in enumerate(texts)}
    logits = np.full((len(texts), len(texts)), -12.0, np.float32)
    logits[:, [ids[text] for text in texts if text not in SPECIAL and not text.startswith("<")]] = -2.0
    words = [ids[SPACE + word] for word in WORDS]

    def after(last: str, **following: float) -> None:
        for text, value in following.items():
            logits[ids[last], ids[text]] = value

    # In any place: an answer of words, and JSON that ends as soon as its schema lets it.
    for text, value in {"}": 6, "]": 6, '"': 4, "3": 3, ":": 3, "{": 1, "[": 1, ",": -1, " ": -3}.items():
        logits[:, ids[SPACE if text == " " else text]] = value
    logits[:, words[:8]] = np.linspace(9, 8, 8)
    logits[:, ids["<|im_end|>"]] = 7.5
    for last in ["</tool_call>", *STRINGS]:
        after(last, **{"<|im_end|>": 16.0, '"': 12.0})
    after("{", **{'"': -1.0})  # keys that the schema does not require are rare
    for digit in "0123456789":
        after(digit, **{"}": 14.0, "]": 14.0, ",": 8.0, **dict.fromkeys("0123456789", -3.0)})
    after('"', **dict(zip(STRINGS, (14.0, 12.5), strict=True)))
    after("<|act|>", **{"<tool_call>": 16.0})
    # A chain of words never goes back, so the most probable answer ends too.
    for at, word in enumerate(words):
        logits[word, words] = -2.0
        logits[word, words[at + 1 : at + 6]] = np.linspace(12, 10, len(words[at + 1 : at + 6]))
        logits[word, ids['"']] = 8.0
        logits[word, ids["<|im_end|>"]] = 16.0 if at > 40 else 6.0
    chain = ["<think>", *THOUGHTS, "</think>"]
    for last, following in pairwise(chain):
        after(last, **{following: 18.0})
    return logits


def _add_weights(writer: GGUFWriter, logits: NDArray[np.float32], width: int) -> None:
    size = len(logits)
    embedding = np.zeros((size, width), np.float32)
    embedding[:, :size] = np.eye(size, dtype=np.float32)
    output = np.zeros((size, width), np.float32)
    output[:, :size] = logits.T / np.sqrt(width)  # a one-hot vector is sqrt(width) long after its norm
    zeros = np.zeros
    writer.add_tensor("token_embd.weight", embedding)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
        writer.add_tensor(f"blk.0.{name}.weight", zeros((32, width), np.float32))
    for name in ("attn_output", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", zeros((width, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.add_tensor("output.weight", output)
