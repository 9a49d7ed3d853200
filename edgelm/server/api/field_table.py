"""The fields of every API that we know and do not implement: ignored, or refused. packaging/api_page.py prints them.

The models of each API own the fields that we implement. A field that another of our APIs has is ignored
with a note in the answer. A field in no table is ignored: clients send fields of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgelm.server.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer, for a feature that we do not have."""

    reason: str
    harmless: tuple[object, ...] = ()  # values that request nothing; null is always one


@dataclass(frozen=True, slots=True)
class Table:
    """The known fields of one API without effect on the answer."""

    route: str
    ignored: Mapping[str, str]  # field: why it has no effect
    refused: Mapping[str, Refused]

    def check(self, data: Mapping[str, Any]) -> None:
        """Raise ApiError for a field that requests something we do not have."""
        for name in self.refused.keys() & data.keys():
            value, refused = data[name], self.refused[name]
            if value is not None and not any(_equal(value, harmless) for harmless in refused.harmless):
                message = f"{name} is not supported: {refused.reason}"
                raise ApiError(400, "unsupported_parameter", message, param=name)


def _equal(value: object, harmless: object) -> bool:
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


_LOCAL = "the model runs on your machine"
_ONE_TIER = "there is one tier"
_OPENAI = {
    "metadata": "nothing is stored with it",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_options": "prefixes are found by their tokens",
    "prompt_cache_retention": "prefixes stay while there is memory, then on disk",
    "safety_identifier": _LOCAL,
    "service_tier": _ONE_TIER,
    "user": _LOCAL,
    "moderation": _LOCAL,
    "cache_prompt": "prefixes are always cached",
    "id_slot": "the scheduler chooses slots",
}
_SAMPLERS = {
    "typical_p": Refused("use min_p", (1, 1.0)),
    "dry_multiplier": Refused("use repetition_penalty", (0, 0.0)),
    "xtc_probability": Refused("use min_p and temperature", (0, 0.0)),
    "mirostat": Refused("use temperature and min_p", (0,)),
    "dynatemp_range": Refused("use temperature", (0, 0.0)),
    "top_n_sigma": Refused("use min_p", (-1, -1.0, 0, 0.0)),
    "use_beam_search": Refused("sampling is the only method", (False,)),
    "length_penalty": Refused("there is no beam search", (1, 1.0)),
    "ignore_eos": Refused("the model decides when it ends", (False,)),
    "min_tokens": Refused("the model decides when it ends", (0,)),
    "lora": Refused("adapters belong to a model: --lora, or lora in its settings", ([],)),
}

_ONE_ANSWER = {"n": Refused("an answer is one choice", (1,))}
_PROMPT_PROBABILITIES = {"prompt_logprobs": Refused("POST /v1/completions has logprobs with echo")}

CHAT = Table(
    "POST /v1/chat/completions",
    {
        **_OPENAI,
        "store": "chats are not stored by this API",
        "verbosity": "models of text have no such switch",
        "web_search_options": "the model has no access to the web",
    },
    {
        "audio": Refused("the model writes text only"),
        "modalities": Refused("the model writes text only", (["text"],)),
        **_SAMPLERS,
        **_PROMPT_PROBABILITIES,
    },
)
COMPLETIONS = Table("POST /v1/completions", _OPENAI, {**_SAMPLERS, **_PROMPT_PROBABILITIES})
_RETURNED = "the response returns it"
RESPONSES = Table(
    "POST /v1/responses",
    {
        **_OPENAI,
        **{name: f"{_OPENAI[name]}; {_RETURNED}" for name in ("prompt_cache_key", "safety_identifier", "user")},
        "access_programs": _LOCAL,
        "background_options": "background is refused",
        "context_management": "a conversation that is too long gets an error",
        "image": "the model writes text only",
        "max_tool_calls": f"it limits tools that OpenAI runs; {_RETURNED}",
        "metadata": f"{_RETURNED}; at most 16 keys of 64 characters, with values of 512",
        "stream_options": "events have no padding",
        "truncation": f"a conversation that is too long gets an error; {_RETURNED}",
    },
    {
        "background": Refused("the answer comes with the request", (False,)),
        "conversation": Refused("use previous_response_id"),
        "prompt": Refused("there are no stored prompts"),
        **_ONE_ANSWER,
        **_SAMPLERS,
    },
)
MESSAGES = Table(
    "POST /v1/messages",
    {
        "betas": "every known feature is on",
        "billing_policy": _LOCAL,
        "cache_control": "prefixes are found by their tokens",
        "compaction": "a conversation that is too long gets an error",
        "container": "tools run at the client",
        "context_management": "a conversation that is too long gets an error",
        "diagnostics": _LOCAL,
        "fallback_credit_token": _LOCAL,
        "fallbacks": "the model that is named answers",
        "inference_geo": _LOCAL,
        "mcp_servers": "tools run at the client",
        "metadata": "nothing is stored with it",
        "prefill": "an assistant's message at the end is continued",
        "service_tier": _ONE_TIER,
        "speed": _LOCAL,
        "thread": "messages have the whole conversation",
        "user_profile_id": _LOCAL,
        "workspace_id": _LOCAL,
    },
    {**_SAMPLERS, **_ONE_ANSWER},
)
_OLLAMA = {"truncate": "a prompt that is too long gets an error", "shift": "an answer ends where the context is full"}
OLLAMA_CHAT = Table(
    "POST /api/chat",
    {**_OLLAMA, "tool_choice": "Ollama has no such field: the model chooses"},
    {**_SAMPLERS, **_ONE_ANSWER},
)
OLLAMA_GENERATE = Table(
    "POST /api/generate",
    _OLLAMA,
    {
        "context": Refused("send the conversation to /api/chat", ([],)),
        "template": Refused("the model's own is used; with raw, the prompt is used as it is", ("",)),
        **_SAMPLERS,
        **_ONE_ANSWER,
    },
)
_MEMORY = "edgelm plans memory by itself; see `edgelm serve --help`"
OLLAMA_OPTIONS = Table(
    "`options` of Ollama's routes",
    {
        **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "low_vram", "numa"), _MEMORY),
        "num_thread": "`--threads` sets it",
        "num_keep": "nothing is cut from a prompt",
        "repeat_last_n": "repeat_penalty counts the whole text",
        "penalize_newline": "a new line is a token like others",
        "tfs_z": "Ollama ignores it too",
    },
    _SAMPLERS,
)
OLLAMA_EMBED = Table("POST /api/embed", {"options": "nothing is sampled"}, {})
OLLAMA_EMBEDDINGS = Table("POST /api/embeddings", {"options": "nothing is sampled"}, {})
_VECTORS = {"user": _LOCAL, "priority": "vectors are computed behind the answers"}
_EVERY_TOKEN = Refused("the model's own special tokens are always added", (True,))
EMBEDDINGS = Table(
    "POST /v1/embeddings",
    _VECTORS,
    {
        "messages": Refused("send a text in input"),
        "add_special_tokens": _EVERY_TOKEN,
        "embed_dtype": Refused("base64 has float32", ("float32",)),
        "normalize": Refused("vectors are normalized", (True,)),
        "embd_normalize": Refused("vectors are normalized by their Euclidean length", (2,)),
    },
)
RERANK = Table(
    "POST /v1/rerank, /v2/rerank, /rerank",
    {**_VECTORS, "max_chunks_per_doc": "a document is read as a whole"},
    {
        "add_special_tokens": _EVERY_TOKEN,
        "max_tokens_per_doc": Refused("truncate: true cuts documents to what the model reads"),
        "rank_fields": Refused("send each document as one text", ([], ["text"])),
    },
)
_LLAMA_SERVER = {
    "cache_prompt": "prefixes are always cached",
    "id_slot": "the scheduler chooses slots",
    "n_cache_reuse": "prefixes are found by their tokens",
    "n_keep": "nothing is cut from a prompt",
    "return_progress": "a stream shows the answer only",
    "return_tokens": "the answer is text",
    "samplers": "the order of samplers is fixed: penalties, top_k, top_p, min_p, temperature",
    "t_max_prompt_ms": "a prompt is read whole; a client that leaves ends it",
    "timings_per_token": "the end of the answer has the times",
    "repeat_last_n": "repeat_penalty counts the whole text",
}
_REFUSED_OF_LLAMA_SERVER = {
    **_SAMPLERS,
    **_ONE_ANSWER,
    "n_probs": Refused("POST /v1/completions has logprobs", (0,)),
    "image_data": Refused("send pictures in messages to POST /v1/chat/completions", ([],)),
}
COMPLETION = Table("POST /completion", _LLAMA_SERVER, _REFUSED_OF_LLAMA_SERVER)
INFILL = Table("POST /infill", _LLAMA_SERVER, _REFUSED_OF_LLAMA_SERVER)
TOKENIZE = Table("POST /tokenize", {}, {})
DETOKENIZE = Table("POST /detokenize", {}, {})
