"""One server that runs a model for us: its connection, its health, and how many requests it takes at a time.

Owns what is known of it, and the errors of its answers in our words. Knows no queue and no dialect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from edgelm.base.errors import one_line
from edgelm.base.model_tables import RemoteTable
from edgelm.client.addresses import is_loopback
from edgelm.client.events import server_events
from edgelm.client.failures import detail_of
from edgelm.client.json_values import mapping, whole
from edgelm.server.api.errors import NO_RETRY, RETRY_AFTER, ApiError
from edgelm.server.remotes.wire import NO_OBJECT, OPTIONAL
from edgelm.server.transport import KEPT, Transport

FIRST_LIMIT, MAX_LIMIT = 16.0, 256.0  # requests at a time
LEAST_LIMIT = 4.0  # that slow first tokens lead to; refusals lead to 1
SLOW, SLOW_S = 4.0, 2.0  # a first token takes this many times the fastest one's time, and this long
BASE_BYTES = 4096  # of a prompt that costs as much as its bytes, beside them
MAX_FAILURES = 3  # in a row, before a server gets none until it is well again
PAUSES_S = (0.5, 1.0, 2.0, 5.0)  # before the checks of one that is down
CHECK_LIMIT_S = 5.0
DRAIN_S = 0.25
QUICK_BYTES = 64 * 2**10  # of a body that the event loop encodes
EMBEDDINGS = "/embeddings"  # of the base URL
JSON = "application/json"
MAX_ERROR_BYTES = 2**16
MAX_LIST_BYTES = 4 * 2**20  # of a list of models
MAX_LINE_BYTES = 8 * 2**20
MAX_ANSWER_BYTES = 256 * 2**20
KEPT_CONNECTIONS, KEPT_S = 32, 4.0  # below the 5 s of uvicorn
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
BLIND = ("image input is not supported", "audio input is not supported")  # llama-server's, with status 500
TOO_LONG = ("context length", "context size", "context window", "context_length", "exceed_context")
STALE = httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError  # of a connection that was kept too long

log = logging.getLogger(__name__)
Kind = Literal["refused", "busy", "failed", "down", "unsupported"]  # the last: it lacks the route, and is well


class BoxError(Exception):
    """A server did not answer: `error` is what the client gets. All kinds but `refused` may go better elsewhere."""

    def __init__(self, kind: Kind, error: ApiError) -> None:
        super().__init__(str(error))
        self.kind = kind
        self.error = error


def has_proxy(base_url: str) -> bool:
    """Return whether the environment names a proxy for a server: for one on another machine, by https.

    So it is for `--endpoint` of the chat. httpx2 then connects, which knows NO_PROXY too.
    """
    is_far = base_url.startswith("https:") and not is_loopback(base_url)
    return is_far and any(os.environ.get(name) for name in PROXIES)


class Box:
    """One address of a model. Made inside the event loop."""

    def __init__(self, base_url: str, model: str, table: RemoteTable, key: str, context: ssl.SSLContext | None) -> None:
        self.base_url = base_url
        self.name = urlsplit(base_url).netloc
        self.num_open = 0
        self.used_at = 0.0
        self.problem = ""  # why it gets no requests now
        self.context: int | None = None  # of the model there
        self.kind = "text"  # of the model there: text, embedding or rerank
        self.omitted: frozenset[str] = frozenset()  # optional fields that it has refused
        self.limit = FIRST_LIMIT
        self._model = model  # by our name
        self._key, self._context = key, context
        self._table = table
        self._secrets = [text for text in (key, *table.headers.values()) if text]
        self._num_failures = 0  # in a row
        self._num_pauses = 0
        self._down_until = 0.0
        self._cut_at = 0.0
        self._fastest: float | None = None  # first token, in seconds a byte of its request
        headers = {"accept-encoding": "identity", "user-agent": "edgelm", **table.headers}
        is_proxied = has_proxy(base_url)
        self._http = httpx2.AsyncClient(
            transport=None if is_proxied else Transport(KEPT_CONNECTIONS, KEPT_S, context),
            verify=context or True,
            limits=httpx2.Limits(max_keepalive_connections=KEPT_CONNECTIONS, keepalive_expiry=KEPT_S),
            headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx2.Timeout(table.timeout_s, connect=table.connect_timeout_s, pool=None),
            follow_redirects=False,
            trust_env=is_proxied,
        )

    @property
    def is_due(self) -> bool:
        """Whether a server that is down is to be looked at again."""
        return _now() >= self._down_until

    @property
    def is_free(self) -> bool:
        return self.num_open < max(1, int(self.limit))

    def at(self, base_url: str) -> Box:
        """Return the same server with another base URL."""
        return Box(base_url, self._model, self._table, self._key, self._context)

    async def close(self) -> None:
        await self._http.aclose()

    # -- what is learnt ----------------------------------------------------------------------------------------------

    def answered(self, sent_at: float, first_token_s: float, num_bytes: int) -> None:
        """Note a complete answer: the limit grows where it was reached, and shrinks where first tokens are slow."""
        self.is_well()
        pace = first_token_s / (BASE_BYTES + num_bytes)
        self._fastest = pace if self._fastest is None else min(self._fastest * 1.01, pace)
        if first_token_s > SLOW_S and pace > SLOW * self._fastest:
            self._cut(sent_at, 0.8, LEAST_LIMIT)
        elif self.num_open + 1 >= int(self.limit):
            self.limit = min(self.limit + 1 / self.limit, MAX_LIMIT)

    def refused(self, sent_at: float) -> bool:
        """Note that it has too many requests; return whether it has others, after which it takes this one."""
        others = self.num_open - 1
        self._cut(sent_at, 0.5, 1.0)
        return others > 0

    def _cut(self, sent_at: float, factor: float, least: float) -> None:
        """Lower the limit, once for all the requests that were under way."""
        if sent_at >= self._cut_at:
            self._cut_at = _now()
            self.limit = min(self.limit, max(least, min(self.limit, self.num_open) * factor))

    def failed(self, kind: Kind, reason: str) -> None:
        """Note a failure. One that is down gets no requests until a check finds it well, unless there is no other."""
        if self.problem and not self.is_due:  # the same failure, of the requests that were under way
            return
        self._num_failures += 1
        if kind == "down" or self._num_failures >= MAX_FAILURES:
            self._down_until = _now() + PAUSES_S[min(self._num_pauses, len(PAUSES_S) - 1)]
            self._num_pauses += 1
            if not self.problem:
                log.warning("%s: %s", self._model, reason)
            self.problem = reason

    def is_well(self) -> None:
        """Note that it answers."""
        if self.problem:
            log.warning("%s: %s answers again", self._model, self.name)
        self._num_failures, self._num_pauses, self.problem = 0, 0, ""

    async def check(self) -> None:
        """Ask for its models: whether it is there, takes our key and has the model, and with which context."""
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                answer = await self._send("GET", "/models", b"")
                try:
                    if answer.status_code == 200:
                        self._learn(json.loads(await _read(answer, MAX_LIST_BYTES)))
                    elif answer.status_code not in (404, 405):  # some have no such list
                        raise await self._error_of(answer, {})
                finally:
                    await answer.aclose()
        except TimeoutError:
            self.failed("down", self._says(f"does not answer within {CHECK_LIMIT_S:.0f} s"))
        except BoxError as error:
            self.failed("down", str(error))
        except (ValueError, RecursionError, httpx2.HTTPError, _TooLargeError):
            self.failed("down", self._says("does not list its models as OpenAI does"))
        else:
            self.is_well()

    def _learn(self, document: Any) -> None:
        entries = mapping(document).get("data")
        models = [mapping(entry) for entry in entries] if isinstance(entries, list) else []
        name = self._table.model
        found = next((entry for entry in models if entry.get("id") == name), None)
        if found is None:
            if models and not self.problem:
                log.warning("%s: %s", self._model, self._says(f"does not list a model {name!r}"))
            return
        if (kind := mapping(found.get("edgelm")).get("kind")) in ("text", "embedding", "rerank"):
            self.kind = str(kind)
        if found.get("owned_by") == "llamacpp":
            self.omitted |= {NO_OBJECT}
        # By the names of edgelm, vLLM, and llama-server.
        lengths = (
            mapping(found.get("edgelm")).get("context"),
            found.get("max_model_len"),
            mapping(found.get("meta")).get("n_ctx"),
            mapping(found.get("meta")).get("n_ctx_train"),
        )
        self.context = next((size for value in lengths if (size := whole(value)) is not None and size > 0), None)

    # -- a request ---------------------------------------------------------------------------------------------------

    async def chunks(self, path: str, body: dict[str, Any], num_bytes: int) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of an answer. Raises BoxError; closing the generator ends the request there.

        `num_bytes` is about the length of the body.
        """
        answer = await self._post(path, body, num_bytes)
        try:
            if self._kind(answer, "text/event-stream", JSON) == JSON:
                yield self._chunk(await _read(answer, MAX_ANSWER_BYTES))
                return
            parts = _limited(answer)
            async with aclosing(server_events(parts)) as events:
                async for event in events:
                    if event.data.startswith("[DONE]"):
                        await _drain(parts)
                        return
                    yield self._chunk(event.data)
        except httpx2.TimeoutException:
            raise self._silent() from None
        except (httpx2.HTTPError, httpx2.StreamError):
            raise self.broken() from None
        except (UnicodeDecodeError, _TooLargeError):
            raise self.strange("sends what is no stream of events") from None
        finally:
            await answer.aclose()

    async def document(self, path: str, body: dict[str, Any], num_bytes: int) -> bytes:
        """Return the JSON of an answer that is no stream, not parsed yet. Raises BoxError."""
        answer = await self._post(path, body, num_bytes)
        try:
            self._kind(answer, JSON)
            return await _read(answer, MAX_ANSWER_BYTES)
        except httpx2.TimeoutException:
            raise self._silent() from None
        except (httpx2.HTTPError, httpx2.StreamError):
            raise self.broken() from None
        except _TooLargeError:
            raise self.strange("sends more than any answer has") from None
        finally:
            await answer.aclose()

    async def _post(self, path: str, body: dict[str, Any], num_bytes: int) -> httpx2.Response:
        """Return an answer of status 200, whose body is not read yet. Raises BoxError."""
        try:
            data = _encoded(body) if num_bytes <= QUICK_BYTES else await asyncio.to_thread(_encoded, body)
        except ValueError:  # an unpaired surrogate, or a number that is none
            raise BoxError(
                "refused", ApiError(400, "invalid_value", "the request has text that is no Unicode")
            ) from None
        answer = await self._send("POST", path, data)
        if answer.status_code == 200:
            return answer
        try:
            raise await self._error_of(answer, body)
        finally:
            await answer.aclose()

    def _kind(self, answer: httpx2.Response, *known: str) -> str:
        """Return the content type of an answer. Raises BoxError for another than the known ones."""
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if answer.headers.get("content-encoding", "identity") != "identity" or kind not in known:
            raise self.strange(
                f"answers with {kind or 'no content type'} and not with {'events' if len(known) > 1 else 'JSON'}"
            )
        return kind

    def broken(self) -> BoxError:
        """Return the error of an answer that ended too soon."""
        message = self._says("broke the connection in the middle of the answer")
        return BoxError("failed", ApiError(502, "remote_failed", message))

    async def _send(self, method: str, path: str, data: bytes) -> httpx2.Response:
        """Return an answer whose body is not read yet. Raises BoxError.

        A request whose connection was kept and breaks is sent again, once. No other is: it may have crashed the server.
        """
        headers = {"content-type": "application/json"} if data else {}
        limit_s = self._table.connect_timeout_s + self._table.timeout_s
        for is_last in (False, True):
            request = self._http.build_request(method, self.base_url + path, content=data, headers=headers)
            try:
                async with asyncio.timeout(limit_s):  # interim answers (103) may come without end
                    return await self._http.send(request, stream=True)
            except STALE:
                if is_last or not request.extensions.get(KEPT):
                    raise self._down("closes the connection without an answer") from None
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                reason = one_line(str(error)) or "no connection"
                raise self._down(f"cannot be reached ({self.without_secrets(reason)})") from None
            except (TimeoutError, httpx2.TimeoutException):
                raise self._silent() from None
            except httpx2.HTTPError:
                raise self.strange("does not speak HTTP") from None
        raise AssertionError

    async def _error_of(self, answer: httpx2.Response, body: Mapping[str, Any]) -> BoxError:
        """Return the error for another status than 200."""
        status = answer.status_code
        if 300 <= status < 400:
            return self.strange("redirects the request, which is not followed: correct the endpoint")
        if status in (401, 403):  # its text may have a part of the key
            message = self._says("refuses the key of this server: see api_key_file of the model")
            return BoxError("down", ApiError(502, "remote_refuses_key", message, headers=NO_RETRY))
        detail, code = await self._detail(answer)
        retry = {RETRY_AFTER: str(min(max(whole(_float(answer.headers.get(RETRY_AFTER))) or 1, 1), 60))}
        if status == 429:
            message = self._says(f"has too many requests{detail and f': {detail}'}")
            return BoxError("busy", ApiError(429, "remote_busy", message, headers=retry))
        if status == 503:
            message = self._says(f"is not ready{detail and f': {detail}'}")
            return BoxError("down", ApiError(503, "remote_unavailable", message, headers=retry))
        if status in (404, 405, 501) and answer.url.path.endswith(EMBEDDINGS):  # it has answers, and no vectors
            message = self._says(f"makes no embeddings{detail and f': {detail}'}")
            return BoxError("unsupported", ApiError(400, "unsupported_by_remote", message, param="model"))
        if status == 404:
            message = self._says(f"has no model {self._table.model!r}, or no {answer.url.path}")
            return BoxError("failed", ApiError(502, "remote_has_no_model", message, headers=NO_RETRY))
        if any(words in detail for words in BLIND):
            return BoxError("refused", ApiError(400, "refused_by_remote", self._says(f"refuses the request: {detail}")))
        if status >= 500:
            message = self._says(f"failed with status {status}{detail and f': {detail}'}")
            return BoxError("failed", ApiError(502, "remote_failed", message))
        if named := frozenset(name for name in OPTIONAL if name in detail and _has(body, name)) - self.omitted:
            self.omitted |= named
        if code == "context_length_exceeded" or any(words in f"{code} {detail}".lower() for words in TOO_LONG):
            code, detail = "context_length_exceeded", detail or "the prompt is too long"
        else:
            code = "refused_by_remote"
        message = self._says(f"refuses the request: {detail or f'status {status}'}")
        return BoxError("refused", ApiError(413 if status == 413 else 400, code, message))

    async def _detail(self, answer: httpx2.Response) -> tuple[str, str]:
        """Return the message of an error and its code, without our keys."""
        document: Any = None
        with suppress(httpx2.HTTPError, ValueError, RecursionError, _TooLargeError):
            document = json.loads(await _read(answer, MAX_ERROR_BYTES))
        error = mapping(document).get("error")
        code = mapping(error).get("code") or mapping(error).get("type") or ""
        return self.without_secrets(one_line(detail_of(document))), code if isinstance(code, str) else ""

    def _chunk(self, data: str | bytes) -> dict[str, Any]:
        """Return a chunk. Raises BoxError for an error in the middle of a stream, and for no JSON."""
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise self.strange("sends what is no JSON") from None
        if chunk is None:  # llama-server's first one, of several prompts
            return {}
        if not isinstance(chunk, dict):
            raise self.strange("sends what is no chunk of an answer")
        if error := chunk.get("error"):
            detail = self.without_secrets(one_line(detail_of(error))) or "no reason given"
            raise BoxError("failed", ApiError(502, "remote_failed", self._says(f"failed: {detail}")))
        return chunk

    def without_secrets(self, text: str) -> str:
        """Return a text of the server's without our key and the values of our headers."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def _says(self, what: str) -> str:
        return f"{self._model} runs at {self.name}, which {what}"

    def _down(self, what: str) -> BoxError:
        error = ApiError(503, "remote_unreachable", self._says(what), headers={RETRY_AFTER: "5"})
        return BoxError("down", error)

    def _silent(self) -> BoxError:
        message = self._says(f"was silent for {self._table.timeout_s:.0f} s")
        return BoxError("failed", ApiError(504, "remote_timeout", message))

    def strange(self, what: str) -> BoxError:
        """Return the error of an answer that is not what was asked for."""
        return BoxError("failed", ApiError(502, "remote_not_understood", self._says(what), headers=NO_RETRY))


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()


class _TooLargeError(Exception):
    """A server sends more than any answer is long."""


async def _limited(answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a stream as they come, which has neither endless lines nor an endless length."""
    total = line = 0
    async for part in answer.aiter_raw():
        total += len(part)
        end = part.rfind(b"\n")
        line = line + len(part) if end < 0 else len(part) - end
        if total > MAX_ANSWER_BYTES or line > MAX_LINE_BYTES:
            raise _TooLargeError
        yield part


async def _read(answer: httpx2.Response, most_bytes: int) -> bytes:
    """Return a whole body. Raises _TooLargeError."""
    data = bytearray()
    async for part in answer.aiter_raw():
        data += part
        if len(data) > most_bytes:
            raise _TooLargeError
    return bytes(data)


async def _drain(parts: AsyncGenerator[bytes, None]) -> None:
    """Read a stream to its end behind its last event, so that its connection can be used again."""
    with suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError, _TooLargeError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in parts:
                pass


def _has(body: Mapping[str, Any], name: str) -> bool:
    """Return whether a body has an optional field, which may stand in its messages."""
    return name in body or any(name in message for message in body.get("messages", ()))


def _float(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
