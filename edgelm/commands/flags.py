"""Flags shared by several commands, and the flags of the settings, made from the definitions in config.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from edgelm.base.config import SETTINGS
from edgelm.base.setting_checks import Command

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="starter, qwen3:4b, OWNER/NAME:QUANT, or a path.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show llama.cpp's log and timings.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Flags = dict[str, object]  # by setting; None: not given


def as_flags(name: str, value: object) -> list[str]:
    """Return a flag as the user gave it, perhaps more than once."""
    spelled = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{spelled}" if value else f"--no-{spelled}"]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{spelled}={one}" for one in values]


def with_settings(command: Command) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function one flag for each setting of the command. It gets the values as `flags`; None: not given."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {option.name: option for option in _options(command)}

        def call(**arguments: Any) -> Any:
            flags = {name: arguments.pop(name) for name in options}
            return function(**arguments, flags=flags)

        signature = inspect.signature(function, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "flags"]
        described: Any = call  # Typer reads these attributes
        described.__signature__ = signature.replace(parameters=[*own, *options.values()])
        described.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options.values()]}
        described.__name__, described.__doc__ = function.__name__, function.__doc__
        return call

    return decorate


def _options(command: Command) -> Iterator[inspect.Parameter]:
    """Yield a parameter for Typer for each setting of a command. Values stay strings: config.py checks them."""
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
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
