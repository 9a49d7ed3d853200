"""Writes presets and the default of a folder into the user's config.toml, whose other lines and comments stay.

Owns the change of the file. presets.py owns its meaning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelm.base.atomic import PRIVATE, atomic_write
from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.base.places import expand_home
from edgelm.chats.presets import Preset, Presets, written_value

if TYPE_CHECKING:
    import tomlkit  # imported where a file is changed: the chat starts without it


def save_preset(presets: Presets, preset: Preset) -> None:
    """Save a preset in the file, in place of one of the same name. Raises EdgeLMError, also for values that the file
    cannot have.
    """
    import tomlkit

    preset = presets.check(preset)

    def change(document: tomlkit.TOMLDocument) -> None:
        table = tomlkit.table()
        if preset.model:
            table["model"] = preset.model
        if preset.system:
            table["system"] = tomlkit.string(preset.system, multiline="\n" in preset.system)
        for name, value in preset.sampling.items():
            table[name] = written_value(name, value)
        if preset.tools:
            table["tools"] = list(preset.tools)
        table.add(tomlkit.nl())  # between it and the next table
        _table(document, "presets")[preset.name] = table

    _change(presets.file, change)
    presets.by_name[preset.name] = preset


def set_folder(presets: Presets, folder: Path, name: str) -> None:
    """Let new chats in a folder begin with a preset; an empty name: with none. Raises EdgeLMError."""
    real = os.path.realpath(folder)

    def change(document: tomlkit.TOMLDocument) -> None:
        folders = _table(document, "folders")
        for written in [key for key in folders if os.path.realpath(expand_home(key)) == real]:
            del folders[written]
        if name:
            folders[real] = name
        elif not folders:
            del document["folders"]

    _change(presets.file, change)
    presets.folders.pop(real, None)
    if name:
        presets.folders[real] = name


def _table(document: tomlkit.TOMLDocument, name: str) -> Any:
    """Return a table of the document, which is made where there is none."""
    import tomlkit

    if name not in document:
        document[name] = tomlkit.table(is_super_table=True if name == "presets" else None)
    return document[name]


def _change(file: Path, change: Callable[[tomlkit.TOMLDocument], None]) -> None:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    target = file.resolve()  # a link of a folder of dotfiles stays a link
    try:
        document = tomlkit.parse(target.read_text(encoding="utf-8")) if target.exists() else tomlkit.document()
        mode = target.stat().st_mode & 0o777 if target.exists() else PRIVATE
        change(document)
        atomic_write(target, tomlkit.dumps(document).encode(), mode=mode)
        target.chmod(mode)  # the umask may have taken bits of the user's mode
    except OSError as error:
        raise EdgeLMError(f"{file} cannot be written: {error.strerror}", "it is as it was") from error
    except (ValueError, TypeError, TOMLKitError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}", "correct it; it is as it was") from None
