"""How long a model stays loaded, as users and clients write it: seconds, or a text such as "5m".

Owns the meaning of `keep_alive`, which is Ollama's: 0 unloads a model when it is idle, a negative value never.
"""

from __future__ import annotations

import math
import re

VALUES = 'seconds, a text such as "90s", "5m" or "1h30m", 0 (at once), or -1 (never)'
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_MAX_LEN = 40
_MAX_S = 1e9  # 31 years: clients make a date of it


def parse_keep_alive(value: object) -> float:
    """Return the seconds that a model stays loaded without a request; infinity: for ever.

    Raises ValueError with the values that fit.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(VALUES)  # noqa: TRY004 - one kind of error for all values that do not fit
    seconds = _parse_text(value.strip()) if isinstance(value, str) else value
    if not -math.inf < seconds < math.inf:
        raise ValueError(VALUES)
    return math.inf if seconds < 0 else float(min(seconds, _MAX_S))


def keep_alive_text(seconds: float) -> str:
    """Return seconds in the form that `parse_keep_alive` reads."""
    if math.isinf(seconds):
        return "-1"
    for unit in ("d", "h", "m"):
        if seconds >= _UNIT_S[unit] and seconds % _UNIT_S[unit] == 0:
            return f"{seconds / _UNIT_S[unit]:.0f}{unit}"
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _parse_text(text: str) -> float:
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    if not rest or len(text) > _MAX_LEN or not rest.isascii():
        raise ValueError(VALUES)
    try:
        return sign * float(rest)
    except ValueError:
        pass
    if _PART.sub("", rest):
        raise ValueError(VALUES)
    return sign * sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(rest))
