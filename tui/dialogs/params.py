"""The sampling parameters of a chat: their names and ranges, and the dialog that sets them.

Owns the values that a user may type. Knows nothing of their effect on an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Input, Label

from edgelm.base.config import SETTINGS
from edgelm.base.errors import RequestError
from edgelm.base.sampling import SAMPLING
from edgelm.tui.dialogs.basic import FOCUS_CSS, Dialog
from edgelm.tui.fields import LineField
from edgelm.tui.hints import CANCEL, Hint, footer
from edgelm.tui.transcript.passages import one_line

Value = float | int | str


class Effort(NamedTuple):
    """How much a reasoning model thinks. `value` is the API's name; None: nothing is sent."""

    value: str | None
    help: str


EFFORTS = {
    "auto": Effort(None, "the model's own way"),
    "off": Effort("none", "an answer at once, where the model can do that"),
    "low": Effort("low", ""),
    "medium": Effort("medium", ""),
    "high": Effort("high", "a long thought before the answer"),
}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: its parser and its help."""

    name: str
    parse: Callable[[object], Any]
    help: str
    own: bool = False  # not in OpenAI's API: sent to edgelm endpoints only


def effort_name(value: Value | None) -> str:
    """Return our name of the API's value."""
    return next((name for name, effort in EFFORTS.items() if effort.value == value), str(value))


def _effort(value: object) -> str | None:
    name = effort_name(str(value).lower())
    if name not in EFFORTS:
        raise ValueError("auto, off, low, medium or high")
    return EFFORTS[name].value


PARAMS = (
    *(Param(name, param.check.parse, param.help, own=not param.in_openai) for name, param in SAMPLING.items()),
    Param("max_tokens", SETTINGS["max_tokens"].parse, "the maximum length of the answer"),
    Param("seed", SETTINGS["seed"].parse, "the same answer each time"),
    Param("reasoning_effort", _effort, "thought: off, low, medium or high"),
)
NARROW = 76  # columns of the terminal; below, only the help of the field with the focus is shown
_BY_NAME = {param.name: param for param in PARAMS}
# The names that other programs have for them, such as repeat_penalty.
_OTHER_NAMES = {other: name for name, param in SAMPLING.items() for other in param.other_names}


def parse_params(text: str, current: Mapping[str, Value]) -> dict[str, Value]:
    """Return the parameters after applying `NAME=VALUE …`; an empty value removes one. Raises RequestError."""
    values = dict(current)
    words = text.split()
    for part, following in zip(words, [*words[1:], "VALUE"], strict=True):
        name, equals, value = part.partition("=")
        name = name.replace("-", "_")
        name = _OTHER_NAMES.get(name, name)
        if name in _BY_NAME and not equals:
            raise RequestError(f"{part} has no value", f"write {name}={following}")
        if name not in _BY_NAME:
            raise RequestError(f"{part!r} sets nothing", "NAME is one of " + ", ".join(_BY_NAME))
        values.pop(name, None)
        if value and (parsed := _parse(_BY_NAME[name], value)) is not None:
            values[name] = parsed
    return values


def _parse(param: Param, value: str) -> Value | None:
    """Return a value; None: nothing is sent. Raises RequestError."""
    try:
        parsed: Value | None = param.parse(value)
    except ValueError as error:
        raise RequestError(f"{param.name} is {value}", f"give {error}") from None
    return parsed


class ParamsScreen(Dialog[dict[str, Value] | None]):
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
        border: round $primary; border-title-color: $foreground; border-subtitle-color: $text-muted;
        background: $surface; padding: 0 1;
    }
    ParamsScreen VerticalScroll { height: auto; max-height: 12; }
    ParamsScreen Horizontal { height: 1; }
    ParamsScreen .name { width: 20; }
    ParamsScreen .help { width: 1fr; color: $text-muted; }
    ParamsScreen Input { width: 12; margin-right: 1; }
    ParamsScreen.-narrow .help { display: none; }
    ParamsScreen.-narrow Input { width: 1fr; }
    ParamsScreen #help { width: 1fr; color: $text-muted; display: none; }
    ParamsScreen.-narrow #help { display: block; }
    ParamsScreen #problem { color: $text-error; height: auto; }
    """ + FOCUS_CSS.format(name="ParamsScreen")

    def __init__(self, current: Mapping[str, Value], defaults: Mapping[str, Value], *, is_edgelm: bool) -> None:
        super().__init__()
        self._current = current
        self._defaults = defaults
        self._is_edgelm = is_edgelm

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Sampling of this chat"
            box.border_subtitle = footer(
                [Hint("Enter", "saves", "screen.save"), CANCEL], "; empty: the endpoint decides"
            )
            with VerticalScroll(can_focus=False):
                for param in PARAMS:
                    with Horizontal():
                        yield Label(param.name, classes="name")
                        default = self._defaults.get(param.name, "not set")
                        value = self._current.get(param.name, "")
                        yield LineField(one_line(str(value)), placeholder=one_line(str(default)), id=param.name)
                        yield Label(self._help(param), classes="help")
            yield Label("", id="help", markup=False)
            yield Label("", id="problem", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < NARROW, "-narrow")

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Show the help of one parameter where there is no room for that of all."""
        if (param := _BY_NAME.get(event.widget.id or "")) is not None:
            self.query_one("#help", Label).update(self._help(param))

    def _help(self, param: Param) -> str:
        return "not sent: not an edgelm endpoint" if param.own and not self._is_edgelm else param.help

    @on(Input.Submitted)
    def _submitted(self) -> None:
        self.action_save()

    def action_save(self) -> None:
        values: dict[str, Value] = {}
        for param in PARAMS:
            field = self.query_one(f"#{param.name}", Input)
            if field.value.strip():
                try:
                    parsed = _parse(param, field.value.strip())
                except RequestError as error:
                    self.query_one("#problem", Label).update(one_line(str(error)))
                    field.focus()
                    return
                if parsed is not None:
                    values[param.name] = parsed
        self.dismiss(values)
