"""The model picker: what is here, then the catalogue with a mark on what fits this machine, then any name of the hub.

Owns the list and its filter; `pick_model` is the picker as an application of its own. Pulls nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from edgelm.errors import ModelError
from edgelm.library.catalog import Entry, entries, hub_reference
from edgelm.library.units import size_text
from edgelm.tui.dialogs import DIALOG_CSS
from edgelm.tui.lines import clean
from edgelm.tui.pulls import Pull

WORKSPACE_BYTES = 5 * 10**8  # beside the weights: a small KV cache and what computing takes
USABLE = 0.95  # of the free memory
FRAME_S = 0.5  # between two looks at the pulls
INTERRUPTED = 130
PULL, STOP = "pull ", "stop "


@dataclass(frozen=True, slots=True)
class Here:
    """A model that is installed."""

    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Picked:
    """What was chosen: `use` a model that is here, `pull` one that is not, `stop` pulling it."""

    name: str
    what: str


def needed_bytes(entry: Entry) -> int:
    """Return the memory that a model of the catalogue takes at least, about."""
    return entry.nbytes + WORKSPACE_BYTES


class PickerScreen(ModalScreen[Picked | None]):
    """Choose a model. `note` says why none can be pulled; `free_bytes` is the memory that one could take."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]
    DEFAULT_CSS = (
        DIALOG_CSS.format(name="PickerScreen")
        + """
        PickerScreen > Vertical { width: 90; }
        PickerScreen OptionList { height: 60vh; max-height: 60vh; }
        PickerScreen OptionList > .option-list--option-disabled { color: $text-muted; }
        """
    )

    def __init__(
        self,
        title: str,
        here: Sequence[Here],
        *,
        current: str = "",
        note: str = "",
        free_bytes: int = 0,
        pulls: Callable[[], Sequence[Pull]] = tuple,
        choose_here: bool = True,
    ) -> None:
        super().__init__()
        self._title = title
        self._here = here
        self._current = current
        self._note = note
        self._free_bytes = free_bytes
        self._pulls = pulls
        self._choose_here = choose_here
        self._listed: dict[str, Text] = {}

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            box.border_subtitle = "Enter chooses, Esc cancels"
            yield Input(placeholder="type to filter" if self._note else "type to filter, or OWNER/NAME of the hub")
            yield OptionList(compact=True)
            yield Label(self._note, markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).compact = True
        self.query_one(Label).display = bool(self._note)
        self._fill("")
        self.set_interval(FRAME_S, self._refresh_pulls)

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def _fill(self, typed: str) -> None:
        """List what the words fit."""
        words = typed.lower().split()
        here = [each for each in self._here if _fits(words, each.name)]
        lines = [_head("Installed"), *(self._line(each) for each in here)] if here else []
        pulls = {pull.model: pull for pull in self._pulls()}
        if pulls:
            lines += [_head("Being pulled: Enter stops, what came is kept"), *map(_pull_line, pulls.values())]
        if not self._note:
            names = {each.name.casefold() for each in self._here} | {name.casefold() for name in pulls}
            rest = [entry for entry in entries() if entry.name not in names]
            offered = [entry for entry in rest if _fits(words, f"{entry.name} {entry.good_at}")]
            if typed.strip() and typed.strip().casefold() not in names:
                lines += self._typed(typed.strip(), offered)
            if offered:
                lines += [_head(f"To pull; ✓ fits the {size_text(self._free_bytes)} of memory that are free")]
                lines += [self._offer(entry) for entry in offered]
        self._show(lines or [Option(Text("no model is called so", "dim"), disabled=True)], typed)

    def _show(self, lines: Sequence[Option], typed: str) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(lines)
        wanted = next((i for i, line in enumerate(lines) if line.id == self._current and not typed), None)
        options.highlighted = next((i for i, line in enumerate(lines) if not line.disabled), None)
        if wanted is not None:
            options.highlighted = wanted
        options.scroll_to(y=0 if wanted is None else max(0, wanted - 3), animate=False)

    def _line(self, model: Here) -> Option:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(clean(model.name), "bold" if model.name == self._current else "")
        text.append(f"  {clean(model.detail)}", "dim")
        return Option(text, id=model.name, disabled=not self._choose_here)

    def _offer(self, entry: Entry) -> Option:
        fits = needed_bytes(entry) <= USABLE * self._free_bytes
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append("✓ " if fits else "  ", "green" if fits else "")
        text.append(f"{entry.name:<22}", "" if fits else "dim")
        size = size_text(entry.nbytes)
        why = entry.good_at if fits else f"needs about {size_text(needed_bytes(entry))} of memory"
        why = f"wants a login of the hub; {why}" if entry.gated else why
        text.append(f" {size:>8}  {why}", "dim")
        return Option(text, id=PULL + entry.name)

    def _typed(self, name: str, offered: Sequence[Entry]) -> Iterable[Option]:
        """Return a line for what was typed, where it is a name that the hub may know."""
        try:
            reference = hub_reference(name)
        except ModelError as error:
            return [] if offered else [Option(Text(clean(str(error)), "dim"), disabled=True)]
        if any(entry.reference() == reference for entry in offered):
            return []
        return [_head("On the hub"), Option(Text(f"pull {clean(name)}"), id=PULL + name)]

    def _refresh_pulls(self) -> None:
        """Show how far the pulls are, and that one has ended."""
        options = self.query_one(OptionList)
        shown = {option.id for option in options.options if option.id and option.id.startswith(STOP)}
        running = {STOP + pull.model: pull for pull in self._pulls()}
        if shown != set(running):
            self._fill(self.query_one(Input).value)
        for option_id, pull in running.items():
            options.replace_option_prompt(option_id, _pull_text(pull))

    def on_key(self, event: events.Key) -> None:
        options = self.query_one(OptionList)
        if event.key in ("up", "down", "pageup", "pagedown") and not options.has_focus:
            event.stop()
            match event.key:
                case "up":
                    options.action_cursor_up()
                case "down":
                    options.action_cursor_down()
                case "pageup":
                    options.action_page_up()  # type: ignore[no-untyped-call]  # Textual's own
                case _:
                    options.action_page_down()  # type: ignore[no-untyped-call]

    @on(Input.Submitted)
    def _submitted(self) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self._choose(options.get_option_at_index(options.highlighted).id)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option_id)

    def _choose(self, option_id: str | None) -> None:
        if option_id is None:
            return
        for beginning in (PULL, STOP):
            if option_id.startswith(beginning):
                self.dismiss(Picked(option_id.removeprefix(beginning), beginning.strip()))
                return
        self.dismiss(Picked(option_id, "use"))


def _fits(words: Iterable[str], text: str) -> bool:
    return all(word in text.lower() for word in words)


def _head(text: str) -> Option:
    return Option(Text(text, "bold"), disabled=True)


def _pull_line(pull: Pull) -> Option:
    return Option(_pull_text(pull), id=STOP + pull.model)


def _pull_text(pull: Pull) -> Text:
    text = Text(f"↓ {clean(pull.model)}", no_wrap=True, overflow="ellipsis")
    text.append("  " + " · ".join(map(clean, pull.progress)), "dim")
    return text


class PickerApp(App[str | None]):
    """The picker alone: for `edgelm pull` without a name."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "interrupt", show=False, priority=True)]

    def __init__(self, here: Sequence[Here], free_bytes: int) -> None:
        super().__init__()
        self._screen = PickerScreen("Pull a model", here, free_bytes=free_bytes, choose_here=False)

    def on_mount(self) -> None:
        if not self.is_headless and self.console.color_system in (None, "standard"):
            self.theme = "ansi-dark"
        self.push_screen(self._screen, lambda picked: self.exit(picked.name if picked else None))

    def action_interrupt(self) -> None:
        """End as a command ends at Ctrl-C."""
        self.exit(return_code=INTERRUPTED)


def pick_model(hub: Path | None = None) -> str | None:
    """Let the user choose a model to pull, on the terminal; None: none of them.

    `hub` is the folder of the hub's cache, by default that of the settings. Raises KeyboardInterrupt at Ctrl-C.
    """
    from edgelm.config import load_config
    from edgelm.executors.memory import available_memory_bytes
    from edgelm.library.local import installed

    folder = hub or load_config({}).places.hub
    here = [Here(model.name) for model in installed(folder)]
    app = PickerApp(here, available_memory_bytes())
    picked = app.run()
    if app.return_code == INTERRUPTED:
        raise KeyboardInterrupt
    return picked
