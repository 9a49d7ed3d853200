"""`edgelm eval` of a model that another server runs: its perplexity, where it tells the probabilities of a prompt.

The windows and the scored tokens are those of an evaluation here, so the figures may be compared. A server needs the
routes /tokenize and /v1/completions with `echo` and `logprobs`: vLLM and edgelm have them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgelm.base.errors import EngineError, RequestError
from edgelm.client.json_values import mapping, number
from edgelm.commands.endpoints import Endpoint
from edgelm.commands.job import StatusLine
from edgelm.evaluation.evaluate import DEFAULT_WINDOW
from edgelm.evaluation.scores import Scores, Tally, perplexity
from edgelm.evaluation.text import MIN_WINDOW, Cut, TextTokens, Window
from edgelm.server.remotes.boxes import Box, BoxError

MAX_SURPRISE = 10_000.0  # in nats: vLLM tells -9999 of a token that cannot come


def eval_endpoint(
    endpoint: Endpoint, text: Path, window: int | None, stride: int | None, limit: int | None, *, as_json: bool
) -> None:
    """Print the perplexity. Raises EdgeLMError."""
    length = window or DEFAULT_WINDOW
    if length < MIN_WINDOW:
        raise RequestError(f"--window is {length}", f"give at least {MIN_WINDOW}")
    cut = Cut(length, stride)
    cut.require_stride()
    status = StatusLine(sys.stderr.isatty())
    with asyncio.Runner() as runner:
        remote = _Remote(endpoint, runner)
        try:
            bos = remote.encode("", bos=True)
            tokens = TextTokens(text, remote)  # type: ignore[arg-type]  # it needs `encode` only
            tally = Tally()
            for part in cut.windows(iter(tokens), bos):
                tally.add(remote.scores(part))
                status.show(f"window {tally.windows:,}, perplexity {perplexity(tally.surprise):.4f}")
                if tally.windows == limit:
                    break
        finally:
            status.clear()
            remote.close()
    if not tally.windows:
        raise RequestError(f"{text.name} is shorter than a window of {length:,} tokens", "give a longer text")
    value = perplexity(tally.surprise)
    result: dict[str, Any] = {
        "model": endpoint.model,
        "endpoint": endpoint.where,
        "perplexity": value,
        "stderr": value * tally.surprise.error,
        "tokens": tally.surprise.count,
        "windows": tally.windows,
        "window": length,
    }
    print(json.dumps(result, ensure_ascii=False) if as_json else "\n".join(_lines(result)))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['model']} at {result['endpoint']}"
    yield f"{'perplexity':<22}  {result['perplexity']:>10.4f}  ± {result['stderr']:.4f}"
    yield f"{'tokens scored':<22}  {result['tokens']:>10,}  in {result['windows']:,} windows of {result['window']:,}"


class _Remote:
    """The server as a tokenizer and as a judge of tokens."""

    def __init__(self, endpoint: Endpoint, runner: asyncio.Runner) -> None:
        self._endpoint = endpoint
        self._runner = runner
        self._root = endpoint.box.at(endpoint.where.removesuffix("/v1"))

    def close(self) -> None:
        for box in (self._root, self._endpoint.box):
            self._runner.run(box.close())

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Return the tokens of a text. Raises EngineError."""
        assert not special
        body = {"prompt": text, "add_special_tokens": bos}  # vLLM's names
        tokens = self._ask(self._root, "/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise EngineError(f"{self._endpoint.where} does not answer /tokenize with tokens")
        return tokens

    def scores(self, window: Window) -> Scores:
        """Return how surprising the scored tokens of a window are. Raises EngineError."""
        body = {"prompt": window.tokens, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        choices = self._ask(self._endpoint.box, "/completions", body).get("choices")
        choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
        values = mapping(choice.get("logprobs")).get("token_logprobs")
        if not isinstance(values, list) or len(values) < len(window.tokens):
            raise EngineError(
                f"{self._endpoint.where} does not tell the probabilities of a prompt (echo with logprobs)",
                "vLLM and edgelm do",
            )
        scored = [number(value) for value in values[window.first : len(window.tokens)]]
        if None in scored:
            raise EngineError(f"{self._endpoint.where} leaves out probabilities of a prompt")
        surprise, empty = -np.array(scored, np.float64), np.empty(0)
        if (np.abs(surprise) > MAX_SURPRISE).any():
            raise EngineError(f"{self._endpoint.where} tells probabilities of a prompt that are out of range")
        return Scores(surprise, empty, empty, np.empty(0, np.bool_))

    def _ask(self, box: Box, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._endpoint.model} | fields
        try:
            return mapping(json.loads(self._runner.run(box.document(path, body, 0))))
        except BoxError as error:
            raise EngineError(str(error)) from None
        except (ValueError, RecursionError):
            raise EngineError(f"{self._endpoint.where} answers {path} with no JSON") from None
