"""A file or folder of the user as an attachment, and whether it has changed since.

Owns which files can be attached, their limits, and the errors for the others. A file is recognized by its first bytes,
not by its name. Files that may hold keys or passwords are refused. Knows nothing of tokens and of who sees the text.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from edgelm.base.errors import RequestError
from edgelm.base.places import expand_home, own_places
from edgelm.base.workers.pictures import MAX_FILE_BYTES, storable_picture
from edgelm.chats.attachments import Attachment
from edgelm.chats.folders import Walk, is_of_the_system, read_regular
from edgelm.chats.knowledge.plain_text import BINARY_ENDINGS, plain_text
from edgelm.chats.knowledge.secret_files import holds_key, is_secret_folder, is_secret_name, is_secret_place
from edgelm.chats.pdf import MAX_PAGES, read_pdf

MAX_TEXT_BYTES = 2 * 2**20  # of a file, and of all files of a folder
MAX_PDF_BYTES = 50 * 2**20
MAX_FOLDER_FILES = 200

State = Literal["same", "changed", "gone"]

_PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
_TOKEN_FILES = frozenset(
    ".npmrc .pypirc .dockercfg .boto .s3cfg .my.cnf .vault-token .yarnrc.yml .databrickscfg .curlrc .wgetrc".split()
)
_PASTE = "paste the part that you want to send"


class Read(NamedTuple):
    """An attachment, and what was left out of it; empty: nothing."""

    attachment: Attachment
    note: str = ""


def full_path(typed: str) -> str:
    """Return the absolute form of a path, which may begin with ~. Raises EdgeLMError."""
    try:
        path = os.path.abspath(expand_home(typed))  # noqa: PTH100 - without ".."
        path.encode()
    except (OSError, ValueError) as error:
        raise RequestError(f"{typed!a} is no path: {error}", "name a file or a folder") from None
    return path


def read_attachment(path: str) -> Read:
    """Return the file or folder at an absolute path as an attachment. Raises EdgeLMError."""
    name = shown_name(path)
    try:
        real = os.path.realpath(path, strict=True)
        if is_of_the_system(path) or is_of_the_system(real):
            raise RequestError(f"{name} lies in a folder of the system: it is not attached", _PASTE)
        if _is_private(path) or _is_private(real):
            raise RequestError(f"{name} may hold a key or a password: it is not attached", _PASTE)
        if Path(real).is_dir():
            return _read_folder(path, name)
        return _read_file(path, name)
    except FileNotFoundError:
        raise RequestError(f"{name} does not exist", "name a file or folder that is there") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", "") or str(error)
        raise RequestError(f"{name} cannot be read: {reason}", "attach another file") from None


def shown_name(path: str) -> str:
    """Return the name of an attachment: below the current folder its path from there, else its last part."""
    try:
        name = os.fspath(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # OSError: the current folder is gone
        name = "."
    return name if name != "." else Path(path).name or path


def state_of(attachment: Attachment) -> State:
    """Tell whether the file of an attachment is as it was. One that was pasted never changes."""
    if not attachment.path:
        return "same"
    try:
        status = Path(attachment.path).stat()
        if not stat.S_ISDIR(status.st_mode):
            if (status.st_size, status.st_mtime_ns) == (attachment.size, attachment.mtime_ns):
                return "same"
            if status.st_size != attachment.size:
                return "changed"
            return "same" if _digest_of_file(attachment.path, status.st_size) == attachment.digest else "changed"
        text, _, _ = _folder_text(attachment.path)
    except (OSError, ValueError):
        return "gone"
    return "same" if _digest(text.encode("utf-8", "replace")) == attachment.digest else "changed"


def pasted(text: str, number: int) -> Attachment:
    """Return a pasted text as an attachment."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Attachment(kind="text", name=f"pasted text {number}", text=text, size=len(text.encode("utf-8", "replace")))


def is_picture(data: bytes) -> bool:
    """Tell whether a file is a picture in a format that is taken, by its first bytes."""
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    is_bmp = data[:2] == b"BM" and data[6:10] == bytes(4)  # a text may begin with these letters
    return is_webp or is_bmp or data.startswith(_PICTURES)


def picture_of(data: bytes, name: str) -> Attachment:
    """Return the bytes of a picture as an attachment without a file. Raises RequestError."""
    picture = storable_picture(data, name)
    return Attachment(
        kind="image", name=name, data=picture.data, media_type=picture.media_type, digest=_digest(data), size=len(data)
    )


def _read_file(path: str, name: str) -> Read:
    data, status = read_regular(path, MAX_PDF_BYTES)
    if not data:
        raise RequestError(f"{name} is empty", "attach another file")
    is_a_picture = is_picture(data)
    is_pdf = b"%PDF-" in data[:1024]
    limit = MAX_PDF_BYTES if is_pdf else MAX_FILE_BYTES if is_a_picture else MAX_TEXT_BYTES
    if len(data) > limit:
        noun = "PDFs" if is_pdf else "pictures" if is_a_picture else "texts"
        raise RequestError(f"{name} is larger than {limit // 2**20} MiB, the limit for {noun}", "attach a part of it")
    stamped = Attachment(
        kind="text", name=name, path=path, digest=_digest(data), size=len(data), mtime_ns=status.st_mtime_ns
    )
    if is_a_picture:
        picture = storable_picture(data, name)
        return Read(replace(stamped, kind="image", data=picture.data, media_type=picture.media_type))
    note = ""
    if is_pdf:
        pdf = read_pdf(path, name)
        if pdf.num_read < pdf.num_pages:
            of = f"of {pdf.num_pages:,} pages"
            note = f"only the first {pdf.num_read:,} {of} are read (limit: {MAX_PAGES} pages or 1 million characters)"
        text = plain_text(pdf.text.encode("utf-8", "replace"))
    else:
        text = plain_text(data)
    if text is None:
        raise RequestError(
            f"{name} is neither text nor PDF nor a picture (PNG, JPEG, WebP, GIF, BMP)", "save it as one"
        )
    if holds_key(text):
        raise RequestError(f"{name} holds a private key: it is not attached", _PASTE)
    media_type = "application/pdf" if is_pdf else "text/plain"
    return Read(replace(stamped, text=text, media_type=media_type), note)


def _read_folder(path: str, name: str) -> Read:
    text, num_files, left_out = _folder_text(path)
    if not num_files:
        raise RequestError(f"{name}/ has no text files", "attach another folder")
    data = text.encode("utf-8", "replace")
    files = "1 file" if num_files == 1 else f"{num_files:,} files"
    attachment = Attachment(
        kind="text", name=f"{name}/ ({files})", path=path, text=text, media_type="text/x-folder",
        digest=_digest(data), size=len(data), mtime_ns=Path(path).stat().st_mtime_ns,
    )  # fmt: skip
    return Read(attachment, left_out)


def _folder_text(path: str) -> tuple[str, int, str]:
    """Return the texts of a folder's files below their names, their number, and what was left out."""
    parts: list[str] = []
    total = num_others = 0
    limit = ""
    walk = Walk(path)
    real = os.path.realpath(path)
    for name in _files(walk):
        if len(parts) == MAX_FOLDER_FILES:
            limit = f"only the first {MAX_FOLDER_FILES} files"
            break
        text = _text_in_folder(real, name)
        if text is None:
            num_others += 1
            continue
        if total + len(text) > MAX_TEXT_BYTES:
            limit = f"only the first {len(parts):,} files: the limit is {MAX_TEXT_BYTES // 2**20} MiB"
            break
        total += len(text)
        end = "" if text.endswith("\n") else "\n"
        parts.append(f"==> {name} <==\n{text}{end}")
    others = f"{num_others:,} left out: not text, too large, or with keys" if num_others else ""
    return "\n".join(parts), len(parts), "; ".join(filter(None, (limit or walk.limit, others)))


def _files(walk: Walk) -> Iterator[str]:
    return (entry.name for entry in walk.entries() if not entry.is_folder and not entry.is_link)


def _text_in_folder(folder: str, name: str) -> str | None:
    """Return the text of a file of a folder; None if it is left out."""
    path = f"{folder}/{name}"
    if _is_private(path) or name.lower().endswith(BINARY_ENDINGS):
        return None
    try:
        data, _ = read_regular(path, MAX_TEXT_BYTES)
    except OSError:
        return None
    text = plain_text(data) if len(data) <= MAX_TEXT_BYTES else None
    return None if text is None or holds_key(text) else text


def _is_private(path: str) -> bool:
    name = Path(path).name
    if is_secret_name(name) or is_secret_name(name.lstrip(".")) or name.lower() in _TOKEN_FILES:
        return True
    return is_secret_place(path) or any(map(is_secret_folder, Path(path).parts)) or _is_own(path)


def _is_own(path: str) -> bool:
    """Tell whether a file is one of ours with settings or permissions, wherever the user has moved these."""
    places = own_places()
    own = (places.config / "config.toml", places.data / "tool_consents.json")
    return path in map(os.path.realpath, own)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of_file(path: str, size: int) -> str:
    data, _ = read_regular(path, size)
    return _digest(data)
