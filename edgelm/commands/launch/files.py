"""Edits of a user's files: the rest of the document is kept, the file is replaced in one step, and backups are made.

Owns formats, backups and their restoration. Knows nothing of agents.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomlkit
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tomlkit.exceptions import TOMLKitError

from edgelm.base.atomic import PRIVATE, atomic_write
from edgelm.base.errors import EdgeLMError
from edgelm.commands.launch.user_files import Document, Format, UserFile

BACKUPS = 5  # of an agent's files
REPLACED = "replaced"  # the texts that the last restoration replaced
INDENTED_LIST = re.compile(r"^( *)[^\s#-].*:[ \t]*(?:#.*)?\n\1 +- ", re.MULTILINE)  # in YAML: deeper than its key
COMMENTS = re.compile(r"(?:[ \t]*(?:#.*)?\n)*[ \t]*(?:#.*)?")  # a YAML file without a value


def apply(files: Iterable[UserFile], backups: Path) -> list[Path]:
    """Edit the files of an agent after saving their texts, and return those that changed.

    Raises EdgeLMError; no file is written if one of them cannot be edited.
    """
    texts = {file: _read(file.path) for file in files}
    edited = {file: _edited(file, before) for file, before in texts.items()}
    changed = {file.path: text for file, text in edited.items() if text != texts[file]}
    if changed:
        backup, before = backups / f"{time.time_ns():020}.json", {file.path: text for file, text in texts.items()}
        _save(backup, before)
        try:
            _replace(changed, before)
        except EdgeLMError:
            backup.unlink()
            raise
        for old in _saved(backups)[:-BACKUPS]:
            old.unlink()
    return list(changed)


def restore(backups: Path) -> list[Path]:
    """Put the texts of the newest backup back, and return the files; a file that was not there is removed.

    The texts that they replace are kept in REPLACED. Raises EdgeLMError.
    """
    saved = _saved(backups)
    if not saved:
        return []
    texts = {Path(path): text for path, text in json.loads(_read(saved[-1]) or "{}").items()}
    before = {path: _read(path) for path in texts}
    _save(backups / REPLACED, before)
    _replace(texts, before)
    saved[-1].unlink()
    return list(texts)


def _saved(backups: Path) -> list[Path]:
    return sorted(backups.glob("*.json"))


def _save(file: Path, texts: Mapping[Path, str | None]) -> None:
    document = json.dumps({str(path): text for path, text in texts.items()})
    try:
        atomic_write(file, document.encode())
    except OSError as error:
        raise EdgeLMError(f"{file} cannot be written: {error.strerror}", "nothing was changed") from None


def _edited(file: UserFile, before: str | None) -> str:
    lines = (before or "").replace("\r\n", "\n")
    is_empty = not lines.strip() or (file.format == "yaml" and COMMENTS.fullmatch(lines) is not None)
    document = _empty(file) if is_empty else _parse(file, lines)
    if not isinstance(document, type(file.empty())):
        raise _unfit(file.path, "its outermost value is of another kind")
    try:
        file.edit(document)
        text = _text(document, file.format, lines)
        text.encode()
    except UnicodeEncodeError:
        raise _unfit(file.path, "it holds a half of a character") from None
    except (AttributeError, TypeError) as error:
        raise _unfit(file.path, f"an entry is of another kind ({error})") from None
    if is_empty and lines.strip():
        text = f"{lines.rstrip()}\n{text}"
    return text.replace("\n", "\r\n") if "\r\n" in (before or "") else text


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise EdgeLMError(f"{path} cannot be read: {error}", "nothing was changed") from None


def _replace(texts: Mapping[Path, str | None], before: Mapping[Path, str | None]) -> None:
    """Write all files, or none: after a failure those that were written get the texts `before`. Raises EdgeLMError."""
    written: list[Path] = []
    for path, text in texts.items():
        try:
            _write(path, text)
        except OSError as error:
            for done in written:
                with suppress(OSError):
                    _write(done, before[done])
            raise EdgeLMError(f"{path} cannot be written: {error.strerror}", "nothing was changed") from None
        written.append(path)


def _write(path: Path, text: str | None) -> None:
    """Replace a file; None removes it. Raises OSError."""
    target = path.resolve()  # a link of a folder of dotfiles stays a link
    if text is None:
        target.unlink(missing_ok=True)
        return
    mode = target.stat().st_mode & 0o777 if target.exists() else PRIVATE
    atomic_write(target, text.encode(), mode=mode)
    target.chmod(mode)  # the umask may have taken bits of the user's mode


def _parse(file: UserFile, text: str) -> Document:
    try:
        if file.format == "json":
            return json.loads(text)
        return tomlkit.parse(text) if file.format == "toml" else _yaml().load(text)
    except RecursionError:
        raise _unfit(file.path, "it is nested too deeply") from None
    except (ValueError, TOMLKitError, YAMLError) as error:
        reason = " ".join(str(error).split())
        if file.format == "json" and "//" in text:
            reason = "it may have comments, which would be lost"
        raise _unfit(file.path, reason) from None


def _empty(file: UserFile) -> Document:
    return tomlkit.document() if file.format == "toml" else file.empty()


def _text(document: Document, kind: Format, before: str) -> str:
    if kind == "json":
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if kind == "toml":
        return tomlkit.dumps(document)
    output, yaml = io.StringIO(), _yaml()
    if INDENTED_LIST.search(before):
        yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(document, output)
    return output.getvalue()


def _yaml() -> Any:
    yaml = YAML(typ="rt")  # keeps comments
    yaml.preserve_quotes = True
    yaml.width = 10_000
    return yaml


def _unfit(path: Path, reason: str) -> EdgeLMError:
    return EdgeLMError(
        f"{path} cannot be edited: {reason}", "nothing was changed; use `edgelm launch` without --config"
    )
