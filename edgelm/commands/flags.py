"""Flags shared by several commands, and the flags of the settings, made from the definitions in config.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from edgelm.base.config import SETTINGS
from edgelm.base.setting_checks import Command

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="starter, qwen3:4b, OWNER/NAME:QUANT, or a path.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show llama.cpp's log and timings.")]
MeasuredEndpoint = Annotated[
    str | None, typer.Option("--endpoint", help="Measure a model of that server.", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Endpoint = Annotated[str | None, typer.Option(help="Another edgelm server.", show_default=False)]
EndpointKey = Annotated[
    str | None,
    typer.Option(help="The key for that server; others see it: EDGELM_API_KEY is better.", show_default=False),
]

Flags = Mapping[str, object]  # by setting; None: not given


@dataclass(frozen=True, slots=True)
class SettingsOf:
    """Marks the argument that gets a flag for each setting of a command: Annotated[Flags, SettingsOf("run")]."""

    command: Command


@dataclass(frozen=True, slots=True)
class _Group:
    """Several flags that a command gets as one argument."""

    flags: Sequence[inspect.Parameter]
    make: Callable[[dict[str, Any]], Any]


def as_flags(name: str, value: object) -> list[str]:
    """Return a flag as the user gave it, perhaps more than once."""
    spelled = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{spelled}" if value else f"--no-{spelled}"]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{spelled}={one}" for one in values]


def for_typer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command for Typer: a dataclass among its arguments is a flag for each field, settings come last."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, _Group] = {}
    own: list[inspect.Parameter] = []
    of_settings: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        marks = getattr(parameter.annotation, "__metadata__", ())
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[name] = _fields(parameter.annotation)
            own += groups[name].flags
        elif marks and isinstance(marks[0], SettingsOf):
            groups[name] = _Group(list(_settings(marks[0].command)), dict)
            of_settings += groups[name].flags
        else:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**arguments: Any) -> Any:
        for name, group in groups.items():
            arguments[name] = group.make({flag.name: arguments.pop(flag.name) for flag in group.flags})
        return function(**arguments)

    described: Any = call  # Typer reads these attributes
    described.__signature__ = signature.replace(parameters=[*own, *of_settings])
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *of_settings)}
    described.__name__, described.__doc__ = function.__name__, function.__doc__
    return call


def _fields(kind: type[Any]) -> _Group:
    hints = get_type_hints(kind, include_extras=True)
    flags = [_flag(entry.name, entry.default, hints[entry.name]) for entry in fields(kind)]
    return _Group(flags, lambda values: kind(**values))


def _flag(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _settings(command: Command) -> Iterator[inspect.Parameter]:
    """Yield a flag for each setting of a command. Values stay strings: config.py checks them."""
    for name, setting in SETTINGS.items():
        if command not in setting.commands:
            continue
        flag = f"--{name.replace('_', '-')}"
        text = setting.help[0].upper() + setting.help[1:] + "."
        kind: Any = str | None
        if setting.kind == "switch":
            kind, option = bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text, show_default=False)
        else:
            kind = list[str] | None if setting.kind == "list" else kind
            option = typer.Option(flag, help=text, metavar=setting.metavar, show_default=False)
        yield _flag(name, None, Annotated[kind, option])
