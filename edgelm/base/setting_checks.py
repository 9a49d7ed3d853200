"""What defines a setting: its check, whether a value comes from config.toml, a variable or a flag, and its help.

Owns the parsers, each of which raises ValueError with the values that fit. config.py owns the settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Command = Literal["chat", "run", "bench", "eval", "convert", "embed", "serve", "service", "plan", "list", "show"]
Kind = Literal["value", "switch", "list"]  # --name VALUE; --name and --no-name; --name VALUE, repeated
MAX_SCALE = 1000.0  # of an adapter
_SWITCH = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class Check:
    """A parser and the name of its values in `--help`."""

    parse: Callable[[object], Any]
    metavar: str
    kind: Kind = "value"


@dataclass(frozen=True, slots=True)
class Setting:
    """The definition of a setting. Values of the file, a variable and a flag go through the same check."""

    parse: Callable[[object], Any]  # raises ValueError with the values that fit
    help: str
    commands: frozenset[Command]  # that have a flag for it
    metavar: str
    kind: Kind
    sampling: bool  # a chat may have its own value
    secret: bool


def setting_field(
    default: object, check: Check, help_text: str, commands: str, *, sampling: bool = False, secret: bool = False
) -> Any:
    """Define a setting; `commands` names those that have a flag for it."""
    names: Any = frozenset(commands.split())
    entry = Setting(check.parse, help_text, names, check.metavar, check.kind, sampling, secret)
    return field(default=default, metadata={"setting": entry})


def number(kind: type[int | float], low: float, high: float, values: str) -> Check:
    """Return the check of a number between two others."""

    def parse(value: object) -> float:
        try:
            number = kind(str(value))
        except ValueError:
            raise ValueError(values) from None
        if not low <= number <= high:
            raise ValueError(values)
        return number

    return Check(parse, "N" if kind is int else "X")


def choice(*names: str, metavar: str = "") -> Check:
    """Return the check of a value among some words."""

    def parse(value: object) -> str:
        if value not in names:
            raise ValueError("one of " + ", ".join(names))
        return str(value)

    return Check(parse, metavar or "|".join(names))


def word_or_number(words: tuple[str, ...], low: int, high: int, values: str) -> Check:
    """Return the check of a word among some, or a whole number between two others."""

    def parse(value: object) -> str:
        text = str(value)
        if text not in words and not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
            raise ValueError(values)
        return text

    return Check(parse, "|".join([*words, "N"]))


def parse_text(value: object) -> str:
    """Parse printable ASCII text."""
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or not value.strip():
        raise ValueError("printable ASCII text")
    return value.strip()


def parse_switch(value: object) -> bool:
    """Parse on or off."""
    text = str(value).strip().casefold()
    if text not in _SWITCH:
        raise ValueError("1 or 0 (on or off, true or false)")
    return _SWITCH[text]


def parse_name(value: object) -> str:
    """Parse a name or a path."""
    if not isinstance(value, str) or not value.isprintable() or not value.strip():
        raise ValueError("a name or a path")
    return value


def parse_folders(value: object) -> tuple[str, ...]:
    """Parse a list of folders."""
    folders = value.split(os.pathsep) if isinstance(value, str) else value  # a variable is one text
    if not isinstance(folders, list | tuple) or any(not isinstance(name, str) or "\0" in name for name in folders):
        raise ValueError("a list of folders")
    return tuple(folder for folder in folders if folder.strip())


def parse_device(value: object) -> str:
    """Parse a kind of device, or names of devices."""
    text = str(value).strip()
    if text in ("auto", "cuda", "gpu", "cpu"):
        return text
    if re.fullmatch(r"[A-Za-z]+\d+(,[A-Za-z]+\d+)*", text) is None:
        raise ValueError("one of auto, cuda, gpu, cpu, or names of llama.cpp's devices such as Vulkan0,Vulkan1")
    return text


def parse_overrides(value: object) -> tuple[str, ...]:
    """Parse PATTERN=DEVICE; several are given as a list, or in one text with commas between them."""
    expected = r"a regular expression and a device, such as \.ffn_.*_exps\.=CPU"
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or any(not isinstance(text, str) for text in texts):
        raise ValueError(expected)
    overrides = [part for text in texts for part in re.findall(r".*?=[A-Za-z]\w*(?:,|$)|.+", text)]
    for override in overrides:
        pattern, equals, device = override.removesuffix(",").rpartition("=")
        if not (pattern and equals and device.isalnum() and pattern.isascii() and pattern.isprintable()):
            raise ValueError(expected)
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{expected}: {error}") from None
    return tuple(override.removesuffix(",") for override in overrides)


def parse_adapters(value: object) -> tuple[str, ...]:
    """Parse ADAPTER or ADAPTER:SCALE; several are given as a list, or in one text with commas between them."""
    expected = "a path, and perhaps a scale such as :0.5, which is at most 1000"
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or any(not isinstance(text, str) for text in texts):
        raise ValueError(expected)
    adapters = tuple(text.strip() for text in texts if text.strip())
    for adapter in adapters:
        path, scale = split_scale(adapter)
        if not path.isprintable() or not abs(scale) <= MAX_SCALE:
            raise ValueError(expected)
    return adapters


def split_scale(adapter: str) -> tuple[str, float]:
    """Return the path and the scale of ADAPTER:SCALE; without a scale it is 1."""
    path, _, number = adapter.rpartition(":")
    if not path or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf)", number.lower()):
        return adapter, 1.0
    return path, float(number)


def words(pattern: str, values: str) -> Callable[[object], tuple[str, ...]]:
    """Return a parser of texts in lower case, separated by commas or given as a list."""

    def parse(value: object) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or any(not isinstance(text, str) for text in texts):
            raise ValueError(values)
        words = [word.strip().lower().rstrip("/") for text in texts for word in text.split(",") if word.strip()]
        if any(re.fullmatch(pattern, word) is None for word in words):
            raise ValueError(values)
        return tuple(words)

    return parse
