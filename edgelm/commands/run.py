"""`edgelm run`: one answer on standard output, everything else on standard error."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgelm.commands.choice import chosen_model
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.config import load_config
from edgelm.errors import RequestError

MAX_INPUT_BYTES = 64 * 2**20


def run_model(
    model: str,
    prompt: str | None,
    flags: Mapping[str, object],
    *,
    stop: list[str],
    raw: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Print the completion of a prompt as it is decoded. Raises EdgeLMError."""
    config = load_config(flags)
    path = chosen_model(model, config).path
    text = _read_prompt(prompt)
    settings = config.settings
    if settings.seed is None:
        settings = replace(settings, seed=secrets.randbits(32))
    job = {"job": "run", "prompt": text, "stop": stop, "raw": raw}
    job |= {"prefixes": str(config.places.prefixes), "drafts": True}
    show = _Output(sys.stdout.isatty())
    with reader_may_leave(), run_job(job, path, settings, config.places, verbose) as events:
        for event in events:
            if event["event"] == "text" and not as_json:
                show.write(event["text"])
            elif event["event"] == "result":
                _finish(event["result"], show, as_json, verbose)


def _read_prompt(prompt: str | None) -> str:
    """Return the argument, standard input where it is piped in, or both with an empty line between."""
    parts = [prompt] if prompt else []
    if not sys.stdin.isatty():
        raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        if len(raw) > MAX_INPUT_BYTES:
            raise RequestError(f"standard input is longer than {MAX_INPUT_BYTES // 2**20} MiB", "no context holds that")
        try:
            piped = raw.decode()
        except UnicodeDecodeError as error:
            raise RequestError(
                f"standard input is not valid UTF-8 (byte 0x{raw[error.start]:02x} at {error.start})",
                "convert it first",
            ) from None
        if piped:
            parts.append(piped)
    if not parts:
        raise RequestError("the prompt is empty", "give it as an argument or on standard input")
    return "\n\n".join(parts)


def _finish(result: dict[str, Any], show: _Output, as_json: bool, verbose: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        show.end()
    usage, timings = result["usage"], result["timings"]
    if result["finish_reason"] == "context":
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        print(f"note: the answer ends because the context of {total:,} tokens is full; raise --ctx", file=sys.stderr)
    if verbose:
        print(
            f"prompt {usage['prompt_tokens']} tokens in {timings['prompt_ms']:.0f} ms, answer "
            f"{usage['completion_tokens']} tokens at {timings['decode_tokens_per_second']:.1f} tokens/s",
            file=sys.stderr,
        )


class _Output:
    """Standard output for text of a model, which must not move a terminal's cursor or write to its clipboard."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._ended = True

    def write(self, text: str) -> None:
        if self._terminal:
            text = "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
        sys.stdout.write(text)
        sys.stdout.flush()
        self._ended = text.endswith("\n")

    def end(self) -> None:
        if not self._ended:
            self.write("\n")
