"""Flags shared by several commands, and the flags of the settings, made from the definitions in config.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
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
EndpointKey = Annotated[
    str | None,
    typer.Option("--api-key", help="The key for it; others see it: EDGELM_API_KEY is better.", show_default=False),
]
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
    return _with_options("flags", list(_options(command)), dict)


def with_fields(kind: type[Any], name: str = "flags") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function one flag for each field of a dataclass. It gets an instance as the argument `name`."""
    hints = get_type_hints(kind, include_extras=True)
    options = [_option(entry.name, entry.default, hints[entry.name]) for entry in fields(kind)]
    return _with_options(name, options, lambda values: kind(**values))


def _with_options(
    name: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function these parameters in place of the argument `name`, which is made of their values."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            made = make({option.name: arguments.pop(option.name) for option in options})
            return function(**arguments, **{name: made})

        signature = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            parameters += options if parameter.name == name else [parameter]
        described: Any = call  # Typer reads these attributes
        described.__signature__ = signature.replace(parameters=parameters)
        described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        described.__name__, described.__doc__ = function.__name__, function.__doc__
        return call

    return decorate


def _option(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
        yield _option(name, None, Annotated[kind, option])
