"""Values that mean "off": what clients of other servers send in place of omitting a field.

Owns the table, for all APIs. A value that means off becomes None or the value that is off here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LEAST_TOP_P = 1e-9  # only the most probable token, as 0 means to OpenAI, llama.cpp and Ollama


def _none_below(limit: int, value: Any) -> Any:
    return None if isinstance(value, int) and not isinstance(value, bool) and value < limit else value


def _not_positive(value: Any) -> Any:
    return _none_below(1, value)


def _negative(value: Any) -> Any:
    return _none_below(0, value)


def _least_top_p(value: Any) -> Any:
    return LEAST_TOP_P if isinstance(value, int | float) and not isinstance(value, bool) and value == 0 else value


def _no_top_k(value: Any) -> Any:
    return 0 if _negative(value) is None and value is not None else value


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [text for text in value if text != ""]
    return None if value == "" else value


Sentinels = Mapping[str, Callable[[Any], Any]]
OFF: Sentinels = {
    "max_tokens": _not_positive,  # LM Studio and llama-server: -1; Ollama: 0 too
    "max_completion_tokens": _not_positive,
    "max_output_tokens": _not_positive,
    "top_k": _no_top_k,  # vLLM: -1
    "top_p": _least_top_p,
    "stop": _without_empty,
    "stop_sequences": _without_empty,
    "reasoning_budget": _negative,  # llama-server: -1
    "thinking_budget_tokens": _negative,
}
# The routes for a text: 0 asks for no token, to warm a cache or to score the prompt, and -1 for no limit.
OFF_OF_TEXTS: Sentinels = {name: off for name, off in OFF.items() if name != "max_tokens"}


def without_sentinels(data: dict[str, Any], sentinels: Sentinels = OFF) -> dict[str, Any]:
    """Return the fields of a body with those that are off as they are here."""
    changed = {name: off(data[name]) for name, off in sentinels.items() if name in data}
    return {**data, **changed} if changed else data
