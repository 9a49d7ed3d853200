"""The variables by which a template turns reasoning off, beside those that requests have already.

Most templates read `enable_thinking` or `thinking`. Where these change nothing, others are tried, and the first that
changes the prompt is taken: Seed-OSS reads `thinking_budget`, Command A `reasoning_effort`, and gpt-oss can think less,
but not stop.

Owns these variables. Knows nothing of what a model writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from edgelm.base.errors import EdgeLMError
from edgelm.text.reasoning import find_reasoning
from edgelm.text.template import ChatTemplate

OFF = {"enable_thinking": False, "thinking": False}
LEAST = "low"  # the effort of a model that cannot stop
_ON = {"enable_thinking": True, "thinking": True}
_EFFORTS = ("reasoning_effort", "reasoning_strength")
_WAYS: tuple[dict[str, Any], ...] = (
    {}, *({name: "none"} for name in _EFFORTS), {"thinking_budget": 0}, {"reasoning": False},
)  # fmt: skip
_WORD = "probe_text"  # that no template writes by itself


class Switched(NamedTuple):
    """The variables of a request with those that its template reads."""

    kwargs: dict[str, Any]
    effort: str = ""  # the one in place of none
    stays_on: bool = False  # reasoning was to be off, and the template has no way


def switched(template: ChatTemplate, kwargs: Mapping[str, Any]) -> Switched:
    """Return the variables of a request, and those that this template needs to turn reasoning off."""
    if any(kwargs.get(name) is not value for name, value in OFF.items()):
        effort = kwargs.get("reasoning_effort")
        own = {} if effort is None or "reasoning_strength" not in template.source else {"reasoning_strength": effort}
        return Switched({**own, **kwargs})
    more = _off(template)
    if more is None:
        return Switched({**kwargs}, stays_on=find_reasoning(template.source) is not None)
    return Switched({**more, **kwargs}, LEAST if LEAST in more.values() else "")


@lru_cache(maxsize=4)
def _off(template: ChatTemplate) -> dict[str, Any] | None:
    """Return what turns reasoning off, beside OFF; None: nothing does. It is tried once per template."""
    usual = _render(template)
    for more in _WAYS:
        if _render(template, **OFF, **more) in ("", usual):
            continue
        (name, value), *_ = *more.items(), ("", "")
        # A template that writes any effort knows none that is "none".
        is_written = value == "none" and _WORD in _render(template, **OFF, **{name: _WORD})
        return {name: LEAST} if is_written else more
    return {} if _render(template, **_ON) not in ("", usual) else None  # off unless a request says otherwise


def _render(template: ChatTemplate, **kwargs: Any) -> str:
    """Return the prompt of a short chat; empty: the template fails."""
    try:
        return template.render([{"role": "user", "content": "Hi"}], **kwargs)
    except EdgeLMError:
        return ""
