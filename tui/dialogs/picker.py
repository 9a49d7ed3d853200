"""The model picker: installed models, then the catalogue with a mark on what fits this machine, then any hub name.

Owns the list and its filter; `pick_model` runs the picker as an app of its own. Pulls nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rich.text import Text
from textual import events, on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from edgelm.base.errors import ModelError
from edgelm.base.machine.memory import USABLE
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.library.catalog import Entry, entries, hub_reference, needed_bytes
from edgelm.library.progress import size_text
from edgelm.tui.dialogs.basic import DIALOG_CSS, Dialog
from edgelm.tui.fields import LineField
from edgelm.tui.hints import CANCEL, Hint, footer
from edgelm.tui.lines import clean, short_name
from edgelm.tui.model_names import FolderEntry, is_path, model_entries
from edgelm.tui.palette import list_text, readable_variables
from edgelm.tui.pulls import Pull

PULL_FRAME_S = 0.5  # between two drawings of the pulls
INTERRUPTED = 130  # exit code at Ctrl-C
PULL, STOP, OPEN = "pull ", "stop ", "open "  # prefixes of option ids
HOME = "~/"


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed model, and its details as text."""

    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Picked:
    """The chosen model, and what to do with it: `use` an installed one, `pull` another, or `stop` its pull."""

    name: str
    action: Literal["use", "pull", "stop"]


class PickerScreen(Dialog[Picked | None]):
    """Choose a model. `note`: why none can be pulled; `free_bytes`: the memory that a model can take.

    `recent` are paths of models outside of the library.
    """

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
        installed: Sequence[Installed],
        *,
        current: str = "",
        note: str = "",
        recent: Sequence[str] = (),
        free_bytes: int = 0,
        pulls: Callable[[], Sequence[Pull]] = tuple,
        choose_installed: bool = True,
    ) -> None:
        super().__init__()
        self._title = title
        self._installed = installed
        self._current = current
        self._note = note
        self._recent = recent
        self._free_bytes = free_bytes
        self._pulls = pulls
        self._choose_installed = choose_installed
        self._folder = ""  # whose models and folders are listed
        self._entries: list[FolderEntry] = []

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            box.border_subtitle = footer([Hint("Enter", "chooses", "screen.choose"), CANCEL])
            path = ", or a path" if self._choose_installed else ""
            more = "" if self._note else f"; OWNER/NAME of the hub{path}"
            yield LineField(placeholder=f"type to filter{more}")
            yield OptionList()
            yield Label(self._note, markup=False)

    def on_mount(self) -> None:
        self.query_one(Label).display = bool(self._note)
        self._fill("")
        self.set_interval(PULL_FRAME_S, self._refresh_pulls)

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def _fill(self, typed: str) -> None:
        """List the models that the typed words match."""
        words = typed.lower().split()
        installed = [model for model in self._installed if _matches(words, model.name)]
        head = "Offered" if self._note else "Installed"
        lines = [_head(head), *map(self._installed_line, installed)] if installed else []
        recent = [path for path in self._recent if _matches(words, path)]
        if self._choose_installed and is_path(typed.strip()):
            if not self._note:  # else it is a path of another machine
                self._list_folder(typed)
            lines = self._path_lines(typed.strip())
        else:
            if recent:
                lines += [_head("Recent"), *(self._installed_line(Installed(path)) for path in recent)]
            if self._choose_installed and not self._note and not words:
                lines += [_head("Yours"), Option("a file or folder …", id=f"{OPEN}{HOME}")]
        pulls = {pull.model: pull for pull in self._pulls()}
        if pulls:
            lines += [_head("Being pulled: Enter stops; partial files are kept"), *map(self._pull_line, pulls.values())]
        if not self._note:
            names = {model.name.casefold() for model in self._installed} | {name.casefold() for name in pulls}
            others = [
                entry
                for entry in entries()
                if entry.name not in names and (entry.kind == "text" or not self._choose_installed)  # a chat needs text
            ]
            offered = [entry for entry in others if _matches(words, f"{entry.name} {entry.good_at}")]
            if typed.strip() and typed.strip().casefold() not in names and not is_path(typed.strip()):
                lines += self._hub_lines(typed.strip(), offered)
            if offered:
                lines += [_head(f"To pull; ✓ fits the {size_text(self._free_bytes)} of memory that are free")]
                lines += map(self._catalogue_line, offered)
        self._show(lines or [Option("no model has this name", disabled=True)], typed)

    def _path_lines(self, typed: str) -> list[Option]:
        """Return the typed path, and the models and folders that it may become."""
        lines, place = [], " of the endpoint's machine, not of this one" if self._note else ""
        if not typed.endswith("/"):
            lines = [_head(f"A file or folder{place}"), Option(self._used(typed), id=typed)]
        folder, name = os.path.split(typed)
        if self._note:
            return lines or [_head(f"A folder{place}"), Option("type the whole path of a model there", disabled=True)]
        if folder != self._folder:
            return [*lines, Option(Text("reading the folder …"), disabled=True)]
        whole = f"{folder.rstrip('/')}/"
        fits = [entry for entry in self._entries if entry.name.lower().startswith(name.lower())]
        fits = [entry for entry in fits if not entry.is_model or whole + entry.name != typed]
        if fits:
            lines.append(_head(f"In {clean(folder)}; Enter opens a folder, and uses a model"))
        for entry in fits:
            path = whole + entry.name
            text = Text(no_wrap=True, overflow="ellipsis")
            text.append(clean(entry.name) + ("" if entry.is_model else "/"))
            text.append(f"  {entry.detail}", "dim")
            lines.append(Option(self._styled(text), id=path if entry.is_model else f"{OPEN}{path}/"))
        return lines or [Option("no GGUF file and no folder here", disabled=True)]

    def _used(self, path: str) -> Content:
        """Return the line that uses a path: its last part first, for a long one is cut."""
        folder, name = os.path.split(clean(path))
        return self._styled(Text.assemble(f"use {name}", (f"  in {folder}", "dim"), no_wrap=True, overflow="ellipsis"))

    @work(group="folder", exclusive=True)
    async def _list_folder(self, typed: str) -> None:
        """Read the folder of a typed path; a slow disk holds nothing else up."""
        folder = os.path.split(typed.strip())[0]
        if folder == self._folder:
            return
        entries = await in_daemon_thread(lambda: model_entries(folder))
        field = self.query_one(Input)
        if os.path.split(field.value.strip())[0] == folder:
            self._folder, self._entries = folder, entries
            self._fill(field.value)

    def _show(self, lines: Sequence[Option], typed: str) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(lines)
        current = next((i for i, line in enumerate(lines) if line.id == self._current and not typed), None)
        first = next((i for i, line in enumerate(lines) if not line.disabled), None)
        options.highlighted = first if current is None else current
        options.scroll_to(y=0 if current is None else max(0, current - 3), animate=False)

    def _installed_line(self, model: Installed) -> Option:
        text = Text(no_wrap=True, overflow="ellipsis")
        name = short_name(model.name)
        text.append(clean(name), "bold" if model.name == self._current else "")
        place = model.name if name != model.name else ""
        text.append(f"  {clean(' · '.join(filter(None, (model.detail, place))))}", "dim")
        return Option(self._styled(text), id=model.name, disabled=not self._choose_installed)

    def _catalogue_line(self, entry: Entry) -> Option:
        fits = needed_bytes(entry) <= USABLE * self._free_bytes
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append("✓ " if fits else "  ", "$text-success" if fits else "")
        text.append(f"{entry.name:<22}", "" if fits else "dim")
        size = size_text(entry.nbytes)
        detail = entry.good_at if fits else f"needs about {size_text(needed_bytes(entry))} of memory"
        detail = f"needs a login to the hub; {detail}" if entry.gated else detail
        text.append(f" {size:>8}  {detail}", "dim")
        return Option(self._styled(text), id=PULL + entry.name)

    def _styled(self, text: Text) -> Content:
        return list_text(text, self.app.current_theme)

    def _hub_lines(self, name: str, offered: Sequence[Entry]) -> Iterable[Option]:
        """Return a line that pulls a typed name, if it can be a name of the hub and none of `offered` is the same."""
        try:
            reference = hub_reference(name)
        except ModelError as error:
            return [] if offered else [Option(Content(clean(str(error))), disabled=True)]
        if any(entry.reference() == reference for entry in offered):
            return []
        return [_head("On the hub"), Option(Text(f"pull {clean(name)}"), id=PULL + name)]

    def _pull_line(self, pull: Pull) -> Option:
        return Option(self._styled(_pull_text(pull)), id=STOP + pull.model)

    def _refresh_pulls(self) -> None:
        """Show the progress of the pulls, and that one has ended."""
        options = self.query_one(OptionList)
        shown = {option.id for option in options.options if option.id and option.id.startswith(STOP)}
        running = {STOP + pull.model: pull for pull in self._pulls()}
        if shown != set(running):
            self._fill(self.query_one(Input).value)
        for option_id, pull in running.items():
            options.replace_option_prompt(option_id, self._styled(_pull_text(pull)))

    def on_key(self, event: events.Key) -> None:
        options = self.query_one(OptionList)
        if event.key == "tab" and is_path(self.query_one(Input).value.strip()):
            event.stop()
            event.prevent_default()
            self._complete(options)
        elif event.key in ("up", "down", "pageup", "pagedown") and not options.has_focus:
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
    def action_choose(self) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self._choose(options.get_option_at_index(options.highlighted).id)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option_id)

    def _choose(self, option_id: str | None) -> None:
        if option_id is None:
            return
        if option_id.startswith(PULL):
            self.dismiss(Picked(option_id.removeprefix(PULL), "pull"))
        elif option_id.startswith(OPEN):
            self._type(option_id.removeprefix(OPEN))
        elif option_id.startswith(STOP):
            self.dismiss(Picked(option_id.removeprefix(STOP), "stop"))
        else:
            self.dismiss(Picked(option_id, "use"))

    def _complete(self, options: OptionList) -> None:
        """Type the path of the chosen line; of the typed path itself, the first one below it."""
        typed = self.query_one(Input).value.strip()
        ids = [option.id for option in options.options[options.highlighted or 0 :] if option.id]
        paths = [path for option_id in ids if (path := option_id.removeprefix(OPEN)) != typed]
        if paths:
            self._type(paths[0])

    def _type(self, path: str) -> None:
        field = self.query_one(Input)
        field.value = path
        field.cursor_position = len(path)
        field.focus()


def _matches(words: Iterable[str], text: str) -> bool:
    return all(word in text.lower() for word in words)


def _head(text: str) -> Option:
    return Option(Text(text, "bold"), disabled=True)


def _pull_text(pull: Pull) -> Text:
    text = Text(f"↓ {clean(pull.model)}", no_wrap=True, overflow="ellipsis")
    text.append("  " + " · ".join(map(clean, pull.progress)), "dim")
    return text


class PickerApp(App[str | None]):
    """The picker alone: for `edgelm pull` without a name."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "interrupt", show=False, priority=True)]

    def __init__(self, installed: Sequence[Installed], free_bytes: int) -> None:
        super().__init__()
        self._screen = PickerScreen("Pull a model", installed, free_bytes=free_bytes, choose_installed=False)

    def get_css_variables(self) -> dict[str, str]:
        self.theme_variables = readable_variables(self.current_theme, super().get_css_variables())
        return self.theme_variables

    def on_mount(self) -> None:
        if not self.is_headless and self.console.color_system in (None, "standard"):
            self.theme = "ansi-dark"
        self.push_screen(self._screen, lambda picked: self.exit(picked.name if picked else None))

    def action_interrupt(self) -> None:
        """End with the exit code of a command at Ctrl-C."""
        self.exit(return_code=INTERRUPTED)


def pick_model(hub: Path | None = None) -> str | None:
    """Let the user choose a model to pull, on the terminal; return None where they cancel.

    `hub` is the folder of the hub's cache, by default the one of the settings. Raises KeyboardInterrupt at Ctrl-C.
    """
    from edgelm.base.config import load_config
    from edgelm.base.machine.memory import available_memory_bytes
    from edgelm.library.scan import installed

    folder = hub or load_config({}).places.hub
    app = PickerApp([Installed(model.name) for model in installed(folder)], available_memory_bytes())
    picked = app.run()
    if app.return_code == INTERRUPTED:
        raise KeyboardInterrupt
    return picked
