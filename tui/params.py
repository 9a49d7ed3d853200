"""The sampling parameters of a chat: their names and ranges, and the dialog that sets them.

Owns what a user may type for each. Knows nothing of what they do to an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from edgelm.config import Parse, Settings
from edgelm.errors import RequestError

Number = float | int


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: how its text is read, and what it does."""

    name: str
    parse: Parse
    help: str
    own: bool = False  # not OpenAI's: only an edgelm endpoint gets it


def _number(low: float, high: float, what: str) -> Parse:
    def parse(value: object) -> float:
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise ValueError(what)
        return number

    return parse


_SETTINGS = {each.name: each.metadata["parse"] for each in fields(Settings)}

PARAMS = (
    Param("temperature", _SETTINGS["temperature"], "0 always takes the likeliest token"),
    Param("top_k", _SETTINGS["top_k"], "among the K likeliest; 0 is off", own=True),
    Param("top_p", _SETTINGS["top_p"], "among the likeliest, up to this sum"),
    Param("min_p", _SETTINGS["min_p"], "none below this part of the best", own=True),
    Param("repetition_penalty", _number(0.01, 10, "0.01 to 10"), "1 is off; 1.1 avoids repetition", own=True),
    Param("frequency_penalty", _number(-2, 2, "-2 to 2"), "against frequent words; 0 is off"),
    Param("presence_penalty", _number(-2, 2, "-2 to 2"), "against words used once; 0 is off"),
    Param("max_tokens", _SETTINGS["max_tokens"], "the answer ends there"),
    Param("seed", _SETTINGS["seed"], "the same answer each time"),
)
_BY_NAME = {param.name: param for param in PARAMS}


def parse_params(text: str, current: Mapping[str, Number]) -> dict[str, Number]:
    """Return the parameters after `NAME=VALUE …`; an empty value takes one away. Raises RequestError."""
    values = dict(current)
    for part in text.split():
        name, equals, value = part.partition("=")
        name = name.replace("-", "_")
        if name not in _BY_NAME or not equals:
            raise RequestError(f"{part!r} sets nothing", "NAME is one of " + ", ".join(_BY_NAME))
        if value:
            values[name] = _parse(_BY_NAME[name], value)
        else:
            values.pop(name, None)
    return values


def _parse(param: Param, value: str) -> Number:
    try:
        number: Number = param.parse(value)
    except ValueError as error:
        raise RequestError(f"{param.name} is {value}", f"give {error}") from None
    return number


class ParamsScreen(ModalScreen[dict[str, Number] | None]):
    """All parameters at once; an empty field leaves the choice to the endpoint."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel", show=False),
        Binding("ctrl+s", "save", "Save", show=False, priority=True),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]
    DEFAULT_CSS = """
    ParamsScreen { align: center middle; }
    ParamsScreen > Vertical {
        width: 76; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    ParamsScreen VerticalScroll { height: auto; max-height: 12; }
    ParamsScreen Horizontal { height: 1; }
    ParamsScreen .name { width: 20; }
    ParamsScreen .help { width: 1fr; color: $text-muted; }
    ParamsScreen Input { width: 12; padding: 0 1; margin-right: 1; background: $boost; }
    ParamsScreen Input:focus { background: $primary; color: $text; }
    ParamsScreen #problem { color: $error; height: auto; }
    """

    def __init__(self, current: Mapping[str, Number], defaults: Mapping[str, Number], *, is_edgelm: bool) -> None:
        super().__init__()
        self._current = current
        self._defaults = defaults
        self._is_edgelm = is_edgelm

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Sampling of this chat"
            box.border_subtitle = "Enter saves, Esc cancels; empty: the endpoint decides"
            with VerticalScroll(can_focus=False):
                for param in PARAMS:
                    with Horizontal():
                        yield Label(param.name, classes="name")
                        default = self._defaults.get(param.name, "")
                        value = self._current.get(param.name, "")
                        yield Input(str(value), placeholder=str(default), id=param.name, compact=True)
                        unused = param.own and not self._is_edgelm
                        yield Label("not sent: not an edgelm endpoint" if unused else param.help, classes="help")
            yield Label("", id="problem", markup=False)

    @on(Input.Submitted)
    def _submitted(self) -> None:
        self.action_save()

    def action_save(self) -> None:
        values: dict[str, Number] = {}
        for param in PARAMS:
            field = self.query_one(f"#{param.name}", Input)
            if field.value.strip():
                try:
                    values[param.name] = _parse(param, field.value.strip())
                except RequestError as error:
                    self.query_one("#problem", Label).update(str(error))
                    field.focus()
                    return
        self.dismiss(values)
