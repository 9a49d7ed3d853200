"""`edgelm` without a command: open the chat, on the full screen of the terminal or in plain lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelm.base.config import SETTINGS, Config, load_config
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.commands.flags import as_flags
from edgelm.commands.presets import read_looks, read_presets, start_preset
from edgelm.commands.running import model_or_served

if TYPE_CHECKING:
    from edgelm.chats.presets import Preset
    from edgelm.client.link import Link
    from edgelm.tui.workspace import ChatDefaults

MAX_LOG_BYTES = 2**20


class _FailureLog(logging.Handler):
    """Appends failures of edgelm itself to a file of the user's own: the lines of code, but no values of variables."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write one failure. Where the file cannot be written, the one line on the screen must do."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_full = self.path.exists() and self.path.stat().st_size > MAX_LOG_BYTES
            mode = os.O_TRUNC if is_full else os.O_APPEND
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o600)
            with os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace") as text:
                text.write(self.format(record) + "\n")


@contextmanager
def _failures_in(path: Path) -> Iterator[Path]:
    """Write what the chat logs into a file: on the terminal it would run into the picture."""
    log, handler = logging.getLogger("edgelm.tui"), _FailureLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    try:
        yield path
    finally:
        log.removeHandler(handler)


def open_chat(
    endpoint: str | None,
    model: str | None,
    flags: Mapping[str, object],
    api_key: str | None = None,
    *,
    preset: str | None = None,
    plain: bool = False,
) -> None:
    """Run the chat until the user leaves it; new chats begin with a preset, if one is named. Raises EdgeLMError."""
    config = load_config(flags)
    is_dumb = config.places.environment.get("TERM") == "dumb"
    # Textual draws on standard error.
    if not plain and not (sys.stdin.isatty() and sys.stderr.isatty()):
        hint = "use `edgelm run MODEL` in scripts, or --plain; --help shows all commands"
        raise EdgeLMError("the chat needs a terminal", hint)
    if is_dumb and not plain:
        print("this terminal is dumb (TERM): the chat is in plain lines, as with --plain")
    from edgelm.tui.workspace import ChatDefaults

    if model and endpoint is None:
        model = _endpoint_name(model, config)
    presets = read_presets(config)
    model, start, note = _with_preset(start_preset(presets, preset, config), model, config, endpoint, named=preset)
    link = _link(config, endpoint, model, flags, api_key)
    defaults = ChatDefaults(
        model or "",
        _sent_settings(config, own_server=endpoint is None),
        presets,
        preset=start,
        is_preset_given=preset is not None,
        resolve=lambda name: name if endpoint else _endpoint_name(name, config),
        note=note,
    )
    if plain or is_dumb:
        num_lost = _run_plain(config, link, defaults)
    else:
        num_lost = _run_screen(config, link, defaults)
    if num_lost:
        raise EdgeLMError(f"the last {num_lost:,} changes of the chats were not saved", "the reason is above")


def _with_preset(
    start: Preset | None, model: str | None, config: Config, endpoint: str | None, *, named: str | None
) -> tuple[str | None, Preset | None, str]:
    """Return the model of new chats, their preset, and a note where the preset's own model is not here.

    Raises ModelError for such a preset that the user `named`.
    """
    if start is None:
        return model, None, ""
    if model or endpoint:
        return model, start.without(("model",)) if model else start, ""
    note = ""
    if start.model:
        try:
            model = _endpoint_name(start.model, config)
        except EdgeLMError as error:
            if named is not None:
                raise ModelError(f"the model of the preset {start.name}: {error.message}", error.hint) from None
            note = f"the model of the preset {start.name}: {error}"  # the chat begins all the same
        start = replace(start, model=model or "")
    return model, start, note


def _link(
    config: Config, endpoint: str | None, model: str | None, flags: Mapping[str, object], api_key: str | None
) -> Link:
    """Return the link to the named endpoint, or to a server of this machine."""
    from edgelm.client.addresses import normalize_address
    from edgelm.client.link import Link

    by_path = endpoint is None and Path(model or "").is_absolute()
    # Flags need a server of our own: a running server has its own settings.
    own = [flag for name, value in flags.items() if value is not None for flag in as_flags(name, value)]
    return Link(
        endpoint=normalize_address(endpoint) if endpoint else None,
        api_key=api_key or _choose_key(endpoint, config),
        runtime=config.places.runtime,
        log=config.places.cache / "serve.log",
        arguments=[*own, *([model] if model and by_path else [])],
        share=not own,
        library=config.library,
    )


def _sent_settings(config: Config, *, own_server: bool) -> dict[str, Any]:
    """Return the sampling settings that the chat sends: what config.toml has for some models, our own server knows."""
    per_model = {name for table in config.models for name in table.settings} if own_server else set()

    def is_sent(name: str) -> bool:
        source = config.sources[name]
        return source != "default" and (source.startswith(("--", "EDGELM_")) or name not in per_model)

    return {
        name: value
        for name, setting in SETTINGS.items()
        if setting.sampling and is_sent(name) and (value := getattr(config.settings, name)) is not None
    }


def _run_screen(config: Config, link: Link, defaults: ChatDefaults) -> int:
    """Run the chat on the full screen; return the number of changes that were not saved."""
    from edgelm.chats.clipboard import copy_text
    from edgelm.chats.tools.toolbox import make_toolbox
    from edgelm.library.suggestion import suggested_model
    from edgelm.tui.answers import OWN_BUG
    from edgelm.tui.app import ChatApp

    places = config.places
    keymap, themes = read_looks(config)
    toolbox = make_toolbox(config.tables.get("tools", {}), places)

    def bandwidth() -> float:
        from edgelm.commands.plan import read_machine

        return read_machine(config.settings, places).read_bytes_per_s

    multiplexer = "tmux" if places.environment.get("TMUX") else "screen" if places.environment.get("STY") else ""
    is_remote = any(places.environment.get(name) for name in ("SSH_CONNECTION", "SSH_TTY"))
    app = ChatApp(
        places.data / "chats.db", link, defaults, knowledge=places.cache / "knowledge.db", bandwidth=bandwidth,
        themes=themes, keymap=keymap, toolbox=toolbox, multiplexer=multiplexer,
        suggested_model=suggested_model, copy=None if is_remote else copy_text,
    )  # fmt: skip
    for name in ("COLUMNS", "LINES"):  # a shell may export them: the screen would keep that size
        os.environ.pop(name, None)
    with _failures_in(places.cache / "chat.log") as log:
        app.run()
    if app.return_code:
        lost = f" (the last {app.num_lost:,} changes were not saved)" if app.num_lost else ""
        report = f"{OWN_BUG} with {log}" if log.exists() else OWN_BUG
        raise EdgeLMError(f"the chat ended: {app.failure or 'the reason is above'}{lost}", report)
    return app.num_lost


def _run_plain(config: Config, link: Link, defaults: ChatDefaults) -> int:
    """Run the chat in plain lines; return the number of changes that were not saved."""
    from edgelm.chats.tools.toolbox import make_toolbox
    from edgelm.tui.plain.chat import PlainChat
    from edgelm.tui.plain.lines import LineReader, Writer

    places = config.places
    toolbox = make_toolbox(config.tables.get("tools", {}), places)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    writer = Writer(sys.stdout)
    # In an Emacs shell, readline would write the user's line a second time.
    edits = sys.stdout.isatty() and places.environment.get("TERM") != "dumb"
    lines = LineReader(sys.stdin, writer, edits=edits)
    knowledge = places.cache / "knowledge.db"
    chat = PlainChat(places.data / "chats.db", link, defaults, lines, writer, knowledge=knowledge, toolbox=toolbox)
    with _failures_in(places.cache / "chat.log"):
        chat.run()
    if writer.failure is not None and not isinstance(writer.failure, BrokenPipeError):
        raise writer.failure
    return chat.num_lost


def _endpoint_name(model: str, config: Config) -> str:
    """Return a model as our own server names it. Raises EdgeLMError where it is not here."""
    if (remote := config.remote_model(model)) is not None:
        return remote.name
    local = model_or_served(model, config)
    # A running server may have another working directory.
    return str(local.path) if local.place == "given" else local.name


def _choose_key(endpoint: str | None, config: Config) -> str | None:
    """Return the key to send. The key in config.toml is for our own server: a named endpoint does not get it."""
    explicit = config.sources["api_key"].startswith(("--", "EDGELM_"))
    return config.settings.api_key if endpoint is None or explicit else None
