"""The clipboard, by a program of the desktop: for pictures, and for a text where a terminal gets no control characters.

Owns which programs are asked. Over ssh they have no clipboard, or that of the other machine.
"""

from __future__ import annotations

import re
import subprocess
from shutil import which

from edgelm.base.errors import RequestError
from edgelm.chats.attached_files import is_picture, picture_of
from edgelm.chats.attachments import Attachment

PROGRAMS = (
    ("wl-paste", "--no-newline", "--type", "image/png"),  # Wayland
    ("xclip", "-selection", "clipboard", "-target", "image/png", "-out"),  # X11
    ("osascript", "-e", "get the clipboard as «class PNGf»"),  # macOS
)
COPIERS = (
    ("wl-copy",),  # Wayland
    ("xclip", "-selection", "clipboard"),  # X11
    ("xsel", "--clipboard", "--input"),
    ("pbcopy",),  # macOS
    ("clip.exe",),  # WSL
)
LIMIT_S = 5.0
_HEX = re.compile(rb"\xc2\xabdata PNGf([0-9A-F]+)\xc2\xbb\s*")  # how osascript prints it


def copy_text(text: str) -> None:
    """Put a text on the clipboard. Raises RequestError."""
    quiet = subprocess.DEVNULL  # some stay in the background with what they were given, as long as it is not replaced
    for program in COPIERS:
        if which(program[0]):
            data = text.encode("utf-16" if program[0] == "clip.exe" else "utf-8", errors="replace")
            try:
                done = subprocess.run(program, input=data, stdout=quiet, stderr=quiet, timeout=LIMIT_S, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                return
    names = ", ".join(program[0] for program in COPIERS)
    raise RequestError(f"nothing here copies: none of {names} works", "/code NUMBER FILE saves code, /export the chat")


def clipboard_picture(number: int) -> Attachment:
    """Return the picture on the clipboard as an attachment; `number` is for its name. Raises EdgeLMError."""
    programs = [program for program in PROGRAMS if which(program[0])]
    if not programs:
        names = ", ".join(program[0] for program in PROGRAMS)
        raise RequestError("no program here reads the clipboard", f"install one of {names}, or attach a file")
    for program in programs:
        try:
            done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        match = _HEX.fullmatch(done.stdout)
        data = bytes.fromhex(match[1].decode()) if match else done.stdout
        if is_picture(data):
            return picture_of(data, f"pasted picture {number}")
    raise RequestError("there is no picture on the clipboard", "copy one, or attach a file")
