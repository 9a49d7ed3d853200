"""Prints docs/api.md: the routes, and the fields of each API by the tables and models of the server.

    python packaging/api_page.py > docs/api.md

Owns the text about everything that is no field. tests/server/api/test_api_page.py fails if the page is not the code's.
"""

from __future__ import annotations

import sys

from pydantic import BaseModel

from edgelm.server.api import field_table
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

_HEAD = """# The APIs

Generated from `packaging/api_page.py`; a test compares.

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

## Pictures

`data:` addresses are read, in the form that each API has. Pictures of `http(s)` addresses are fetched from the hosts of
`edgelm serve --picture-host NAME` only, without following redirects; a private address must be named itself,
with a port that is not the usual one.

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

- `draft`: who may draft, of those that the server lets draft: `"ngram"`, `"mtp"`, `"auto"` (all) or `"off"`.
  `"speculation": false` is an older way to write `"draft": "off"`.
- `repeatable`: `true` demands the same answer every time, to the letter: the seed is 0 if none is given. A model that
  was loaded without `--repeatable` refuses it.
- `prediction`: `{"type": "content", "content": TEXT}`, as OpenAI's: a text that the answer probably repeats, to draft
  from.
- `edgelm`: `{"past": [MESSAGE, …]}`, messages to draft from; the model does not see them. Answers have a field of this
  name too, with figures and notes.
- Sampling, `draft`, `repeatable` and the forms of an answer below work in every API. Ollama's belong into `options`,
  which come before the same fields beside them.
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
and limit texts and lists (`maxLength`, `maxItems`). A form without an end of its own, as `[a-z]+` or a text without
`maxLength`, may go on until `max_tokens` or the end of the context: the answer then ends with `length`, and
`edgelm.notes` says so. White space has one form in JSON here, so that a model cannot go on with it.

# Fields

*Ignored* fields change no answer of ours. *Refused* fields get a 400 that names them, unless their value requests
nothing. A field that only another of these APIs has is ignored with a note in `edgelm.notes`. A field in no list is
ignored; `edgelm serve -v` logs it.
"""


def markdown() -> str:
    """Return docs/api.md."""
    tables: list[tuple[field_table.Table, type[BaseModel]]] = [
        (field_table.CHAT, ChatRequest),
        (field_table.COMPLETIONS, CompletionsRequest),
        (field_table.RESPONSES, ResponsesRequest),
        (field_table.MESSAGES, MessagesRequest),
        (field_table.EMBEDDINGS, EmbeddingsRequest),
        (field_table.RERANK, RerankRequest),
        (field_table.OLLAMA_CHAT, OllamaChatRequest),
        (field_table.OLLAMA_GENERATE, GenerateRequest),
        (field_table.OLLAMA_OPTIONS, Options),
        (field_table.OLLAMA_EMBED, OllamaEmbedRequest),
        (field_table.OLLAMA_EMBEDDINGS, OllamaEmbeddingsRequest),
        (field_table.COMPLETION, CompletionRequest),
        (field_table.INFILL, InfillRequest),
        (field_table.TOKENIZE, TokenizeRequest),
        (field_table.DETOKENIZE, DetokenizeRequest),
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
