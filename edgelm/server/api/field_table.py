"""The fields of every API: implemented, ignored or refused. docs/api.md is generated from this table.

    python -m edgelm.server.api.field_table > docs/api.md

Owns the fields that we know and do not implement. The models of each API own those that we implement. A field in no
table is ignored: clients send fields of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

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
    "top_n_sigma": Refused("use min_p", (-1, -1.0)),
    "use_beam_search": Refused("sampling is the only method", (False,)),
    "length_penalty": Refused("there is no beam search", (1, 1.0)),
    "ignore_eos": Refused("the model decides when it ends", (False,)),
    "min_tokens": Refused("the model decides when it ends", (0,)),
    "stop_token_ids": Refused("use stop", ([],)),
    "lora": Refused("adapters belong to a model: --lora, or lora in its settings", ([],)),
}

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
        "n": Refused("a response is one answer", (1,)),
        "prompt": Refused("there are no stored prompts"),
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
    {},
)
_OLLAMA = {"truncate": "a prompt that is too long gets an error", "shift": "an answer ends where the context is full"}
OLLAMA_CHAT = Table("POST /api/chat", {**_OLLAMA, "tool_choice": "Ollama has no such field: the model chooses"}, {})
OLLAMA_GENERATE = Table(
    "POST /api/generate",
    _OLLAMA,
    {
        "context": Refused("send the conversation to /api/chat", ([],)),
        "images": Refused("the model reads text only", ([],)),
        "template": Refused("the model's own is used; with raw, the prompt is used as it is", ("",)),
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
    {name: _SAMPLERS[name] for name in ("typical_p", "mirostat")},
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
_NO_PROBABILITIES = {"n_probs": Refused("POST /v1/completions has logprobs", (0,))}
COMPLETION = Table("POST /completion", _LLAMA_SERVER, {**_SAMPLERS, **_NO_PROBABILITIES})
INFILL = Table("POST /infill", _LLAMA_SERVER, {**_SAMPLERS, **_NO_PROBABILITIES})
TOKENIZE = Table("POST /tokenize", {}, {})
DETOKENIZE = Table("POST /detokenize", {}, {})

_HEAD = """# The APIs

Generated from `edgelm/server/api/field_table.py`; a test compares.

## Other routes

- `GET /health`: that the server runs; needs no key.
- `GET /v1/models`, `GET /v1/models/NAME`: the models that are offered; in Anthropic's form with the header
  `anthropic-version`.
- `GET /v1/responses/ID`, `DELETE /v1/responses/ID`, `GET /v1/responses/ID/input_items`: a stored response, its input.
  A response is stored unless the request says `"store": false`. One that could not be, as on a full disk, has
  `"store": false` and the reason in `edgelm.notes`, also in the last event of a stream.
- `POST /v1/responses/input_tokens`, `POST /v1/messages/count_tokens`: the number of tokens of a request.
- `GET /api/version`, `/api/tags`, `/api/ps` and `POST /api/show`: Ollama's descriptions of models; they load none.
  `POST /api/pull` pulls a model of the catalogue or of the hub; it needs the same right as loading and unloading.
- `GET /props`, `GET /slots`: llama-server's descriptions of a model (`?model=NAME`) and of the asking key's own open
  requests. `POST /apply-template`: the prompt of a chat, whose fields are those of `/v1/chat/completions`.
- `GET /tokenizer_info`: vLLM's description of a tokenizer (`?model=NAME`): its special tokens and the chat template.
- `GET /edgelm/ps`: the loaded models, as `edgelm ps` shows them.
- `GET /metrics`: the numbers of the server and its models for Prometheus, under vLLM's names with `edgelm:` in place of
  `vllm:`; `GET /edgelm/top`: those that `edgelm top` shows. Neither loads a model or keeps one loaded.
- `GET /edgelm/events`: the steps of an engine as they happen, which `edgelm watch` draws; see below.
- `/chat/completions`, `/embeddings`, `/reranking`: `/v1/chat/completions`, `/v1/embeddings` and `/v1/rerank` by
  llama-server's other names; and `/completions` is `/completion`.
- `GET /models`: as `/v1/models`, by the name that llama-server's router has; both tell each model's `status`.
- `POST /models/load` with `{"model": NAME, "keep_alive": TIME}`, `POST /models/unload` with `{"model": NAME}`; they
  need a key marked `admin`, or come from a program on the server's own machine without a key of a key file: a key
  that is not marked may not, wherever it comes from.

## The steps of an engine

`GET /edgelm/events` streams server-sent events about the engine of a loaded model: that of `?model=NAME`, or the first;
when it ends, the next. Watching loads no model, keeps none loaded and takes no turn. The engine never waits for a
reader: one that lags 512 events behind loses the oldest. Each event has a name and a line of JSON:

- `idle`: no model is loaded.
- `engine`, before the others of an engine: `model`, `engine`, `device`, `context`, `slots`, `step_tokens` (at most so
  many in a step), `capacity` (positions of the KV cache), `kv_bytes_per_token`, `weights_bytes` (0: not known).
- `step`, after each step: `step` (its number), `at` (Unix time of its end), `ms`, `running`, `waiting`, `chunks`.
- `kv`, when the KV cache has changed, at most four times a second: `at`, `usage` (0 to 1, of running requests),
  `regions`, `others`.
- `lost`, after a gap: `records` (how many events).

A chunk is the part of a step that belongs to one request: `sequence` (its number), `prompt` and `cached` (tokens),
`start` (position of the first computed token), `computed` (tokens, with the draft), `drafted`, `forced` (leading tokens
of the draft that a grammar left no choice for), `accepted`, `new` (tokens of the answer), and in its last one
`finish_reason`. A chunk of the reader's own key has `request_id` and `tokens` too: `id`, `text`, and with `logprobs` in
the request `logprob` and `top`.

A region is a part of the KV cache or a saved state, of a `kind`: in the cache `running`, `idle` (a prefix that can be
reused) and `shared` (one that several conversations begin with); in memory `snapshot` and `shared_snapshot`; on disk
`file`. It has `tokens`, `bytes`, and `sequence` if it is a running request's. `regions` are those of the reader's key;
`others` are sums of all other keys, by kind.

## Bodies

- The content type is `application/json`. A program on the server's own machine, and one with a key in a header, may
  leave it out or send that of a form, as `curl -d` does; a web page may not.
- A body has at most 16 MiB and 50,000 values, a list or an object in it 4,096 entries, unless it is one of token ids.
- There are at most 64 stop strings of 1,024 characters. A grammar has at most 262,144 characters, and any other field
  that is neither a conversation nor a text to read has 1,048,576.
- Bodies of more than 64 KiB share 32 MiB of the server's memory, a key's 24 MiB at most; then others wait, and after 30
  seconds they are refused with 429.

## Request ids

Every answer has the header `x-request-id`: the one of the request, if it has at most 128 letters, digits and
`._:/+=@-`, or a new one. `edgelm serve --log-format json` writes it with each request.

## Loading

A request for a model that is not loaded waits until it is. The header `Prefer: wait=SECONDS` waits for at most so long,
then the answer is 503 with `Retry-After`, in Anthropic's API 529; `Prefer: wait=0` does not wait.

Where there is no memory for another model, the least recently used idle one is unloaded; models in use are waited for,
for five minutes at most, then the answer is the same 503. A model that can never fit gets a 503 with
`x-should-retry: false` at once.

- `keep_alive`, of every API and as Ollama's: how long the model stays loaded after the request, in seconds or as a text
  such as `"5m"`; `0`: it is unloaded when it is idle; `-1`: never, not for another model either. It holds until another
  request has one. It is ignored where the key may not load and unload.

## Ollama's and llama-server's routes

- `edgelm serve --ollama-port 11434` listens at Ollama's port too.
- A name may end with `:latest`. A model in Ollama's store is called `ollama:NAME:TAG`, or `NAME:TAG` where no other
  model is called so.
- `/api/chat` and `/api/generate` without a message or a prompt load the model; with `keep_alive: 0` they unload it.
- `options.num_ctx` never loads a model again. Where it is more than the context, a note in `edgelm.notes` of the answer
  says so, and a conversation that is too long gets an error.
- In llama-server's routes `model` may be missing: the first model of `edgelm serve MODEL` answers, or else the one that
  was used last.
- A file name in `/infill` is a label in the prompt: no path of a request is opened. Texts that do not fit are cut: the
  beginning of the prefix, the end of the suffix, the first files.

## Embeddings and rankings

`POST /v1/embeddings` gives normalized vectors; a model that writes text has some too, the mean of its last hidden
states. Rankings need a reranker: `relevance_score` is 0 to 1. An input that is too long is refused, unless `truncate`
is true or `truncate_prompt_tokens` is its number of tokens (-1: as many as the model reads). Token ids must be those of
the model: OpenAI's are refused, which LangChain's `OpenAIEmbeddings` sends unless `check_embedding_ctx_length=False`.
Such work has a fifth of the time while the same model writes answers.

## Own fields

- `speculation`: `false` turns drafts off.
- `repeatable`: `true` demands the same answer every time, to the letter: the seed is 0 if none is given. A model that
  was loaded without `--repeatable` refuses it.
- `prediction`: `{"type": "content", "content": TEXT}`, as OpenAI's: a text that the answer probably repeats, to draft
  from.
- `edgelm`: `{"past": [MESSAGE, …]}`, messages to draft from; the model does not see them. Answers have a field of this
  name too, with figures and notes.
- `structured_outputs`: one of `{"json": SCHEMA}`, `{"regex": TEXT}`, `{"choice": [TEXT, …]}`, `{"grammar": TEXT}` and
  `{"json_object": true}`, as vLLM's.

## Tools of other types

The model calls tools that the client runs: functions, and custom tools, whose input is a text. Tools that a provider
would run itself, such as a web search, are ignored in `/v1/responses` and `/v1/messages`, with a note in `edgelm.notes`
of the answer, and refused in `/v1/chat/completions`.

## Calls and schemas

A named tool is called exactly once. Where the model must call something (`required`, Anthropic's `any`), it calls
once, unless the request says `"parallel_tool_calls": true` (`"disable_parallel_tool_use": false`). An answer ends
before a call that repeats an earlier one with the same arguments, with a note in `edgelm.notes`. A tool without
parameters gets `{}`, and an object that names `properties` in a tool's schema has no others, unless
`additionalProperties` or `unevaluatedProperties` is given; a `response_format` is taken by the letter.

`oneOf`, `not`, `contains`, `propertyNames`, `if`, dependencies and the `unevaluated` keywords are enforced by a
stronger schema where there is one: a list that contains something begins with it. Items of `uniqueItems` differ. A
keyword that cannot be enforced is refused; with `"strict": false`, `edgelm.notes` names it.

## Values that mean off

`max_tokens` of -1 or 0 in a conversation, and -1 for a text, is no limit; `top_k` of -1 is off; `top_p` of 0 leaves the
most probable token; empty stop strings are none. Half a character in a body (a lone surrogate) becomes U+FFFD, with a
note. Messages of one side that follow each other are one, where the chat template demands that roles alternate.

## Small models

Small models write without end where a schema allows it: close the objects of schemas (`"additionalProperties": false`)
and limit texts and lists (`maxLength`, `maxItems`).

# Fields

*Ignored* fields change no answer of ours. *Refused* fields get a 400 that names them, unless their value requests
nothing. A field in no list is ignored; `edgelm serve -v` logs it.
"""


def markdown() -> str:
    """Return docs/api.md."""
    from edgelm.server.api.chat import ChatRequest
    from edgelm.server.api.completions import CompletionsRequest
    from edgelm.server.api.embeddings import EmbeddingsRequest
    from edgelm.server.api.llama_server import CompletionRequest, InfillRequest
    from edgelm.server.api.llama_texts import DetokenizeRequest, TokenizeRequest
    from edgelm.server.api.messages import MessagesRequest
    from edgelm.server.api.ollama import GenerateRequest, OllamaChatRequest, Options
    from edgelm.server.api.ollama_embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
    from edgelm.server.api.rerank import RerankRequest
    from edgelm.server.api.responses import ResponsesRequest

    tables: list[tuple[Table, type[BaseModel]]] = [
        (CHAT, ChatRequest),
        (COMPLETIONS, CompletionsRequest),
        (RESPONSES, ResponsesRequest),
        (MESSAGES, MessagesRequest),
        (EMBEDDINGS, EmbeddingsRequest),
        (RERANK, RerankRequest),
        (OLLAMA_CHAT, OllamaChatRequest),
        (OLLAMA_GENERATE, GenerateRequest),
        (OLLAMA_OPTIONS, Options),
        (OLLAMA_EMBED, OllamaEmbedRequest),
        (OLLAMA_EMBEDDINGS, OllamaEmbeddingsRequest),
        (COMPLETION, CompletionRequest),
        (INFILL, InfillRequest),
        (TOKENIZE, TokenizeRequest),
        (DETOKENIZE, DetokenizeRequest),
    ]
    text = _HEAD
    for table, model in tables:
        fields = ", ".join(f"`{name}`" for name in sorted(model.model_fields.keys() - table.ignored.keys()))
        text += f"\n## {table.route}\n\nImplemented: {fields}.\n"
        text += "\n| field | |\n|---|---|\n" if table.ignored or table.refused else ""
        rows = {name: f"ignored: {reason}" for name, reason in table.ignored.items()}
        rows |= {name: f"**refused**: {refused.reason}" for name, refused in table.refused.items()}
        text += "".join(f"| `{name}` | {rows[name]} |\n" for name in sorted(rows))
    return text


if __name__ == "__main__":
    sys.stdout.write(markdown())
