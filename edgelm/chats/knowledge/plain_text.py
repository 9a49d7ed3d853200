"""Bytes to text: encodings, line ends, and what is no text.

Knows nothing of files.
"""

from __future__ import annotations

import codecs
import re

NOT_TEXT = "not a text file"

# Endings of files that are no text, so that they need not be read.
BINARY_ENDINGS = tuple(
    ".pdf .doc .docx .odt .xls .xlsx .ods .ppt .pptx .odp .epub .mobi .png .jpg .jpeg .gif .webp .bmp .ico .tif "
    ".tiff .heic .psd .mp3 .mp4 .m4a .mkv .mov .avi .wav .flac .ogg .webm .zip .gz .tgz .bz2 .xz .zst .7z .rar "
    ".tar .jar .whl .iso .img .exe .dll .so .dylib .a .o .obj .class .pyc .wasm .bin .dat .gguf .safetensors .pt "
    ".pth .onnx .npy .npz .parquet .sqlite .sqlite3 .db .db-wal .db-shm .ttf .otf .woff .woff2 .deb .rpm .dmg "
    ".apk .pkl .h5".split()
)

_BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins as UTF-16's does
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
# Escape sequences, control characters, and the tags of Unicode: hidden letters, in which orders to a model can stand.
_UNSHOWN = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
MAX_CONTROL_SHARE = 0.01
MAX_BROKEN_SHARE = 0.1  # of the characters outside of ASCII, in a text that is UTF-8


def plain_text(data: bytes) -> str | None:
    """Return the text of a file, with one kind of line end and without control characters; None if it is no text."""
    mark = next((mark for mark in _BOMS if data.startswith(mark)), b"")
    if mark:
        text = data[len(mark) :].decode(_BOMS[mark], "replace")
    elif b"\0" in data:
        return None
    else:
        text = _decoded(data)
    if len(_CONTROL.findall(text)) > MAX_CONTROL_SHARE * len(text) + text.count("\x1b["):
        return None
    return _UNSHOWN.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def _decoded(data: bytes) -> str:
    """Decode bytes without a mark: as UTF-8, with some broken characters if most are right, or as Windows-1252."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
    broken = text.count("\ufffd")
    others = sum(not char.isascii() for char in text)
    return text if broken <= MAX_BROKEN_SHARE * others else data.decode("cp1252", "replace")
