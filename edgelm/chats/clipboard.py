"""The clipboard, by a program of the desktop: for pictures, and for a text where a terminal gets no control characters.

Owns which programs are asked. Over ssh they have no clipboard, or that of the other machine.
"""

from __future__ import annotations

import base64
import re
import subprocess
from shutil import which

from edgelm.base.errors import RequestError
from edgelm.base.places import own_environment
from edgelm.chats.attached_files import is_picture, picture_of
from edgelm.chats.attachments import Attachment

PROGRAMS = (
    ("wl-paste", "--no-newline", "--type", "image/png"),  # Wayland
    ("xclip", "-selection", "clipboard", "-target", "image/png", "-out"),  # X11
    ("osascript", "-e", "get the clipboard as «class PNGf»"),  # macOS
)
# In base64: PowerShell reads its input in the code page of the console.
_SET_CLIPBOARD = "Set-Clipboard -Value ([Text.Encoding]::UTF8.GetString([Convert]::FromBase64String((-join $input))))"
COPIERS = (
    ("wl-copy",),  # Wayland
    ("xclip", "-selection", "clipboard"),  # X11
    ("xsel", "--clipboard", "--input"),
    ("pbcopy",),  # macOS
    ("powershell.exe", "-NoProfile", "-NonInteractive", "-Command", _SET_CLIPBOARD),  # WSL
    ("clip.exe",),  # WSL where PowerShell is locked
)
LIMIT_S = 5.0
POWERSHELL_LIMIT_S = 15.0  # its first start after Windows' takes long
_HEX = re.compile(rb"\xc2\xabdata PNGf([0-9A-F]+)\xc2\xbb\s*")  # how osascript prints it


def copy_text(text: str) -> None:
    """Put a text on the clipboard. Raises RequestError."""
    quiet = subprocess.DEVNULL  # some stay in the background with what they were given, as long as it is not replaced
    for program in COPIERS:
        if which(program[0]):
            data, environment = _input_of(program[0], text)
            limit_s = POWERSHELL_LIMIT_S if program[0] == "powershell.exe" else LIMIT_S
            try:
                done = subprocess.run(
                    program, input=data, env=environment, stdout=quiet, stderr=quiet, timeout=limit_s, check=False
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                return
    names = ", ".join(program[0] for program in COPIERS)
    raise RequestError(f"nothing here copies: none of {names} works", "/code NUMBER FILE saves code, /export the chat")


def _input_of(program: str, text: str) -> tuple[bytes, dict[str, str]]:
    """Return the input by which a program copies a text, and its environment."""
    environment = dict(own_environment())
    data = text.encode(errors="replace")
    if program == "powershell.exe":
        data = base64.b64encode(data)
    elif program == "clip.exe":  # it copies the mark, too; without one it guesses, and spoils some texts
        data = text.encode("utf-16", errors="replace")
    elif program == "pbcopy":  # without a locale, as in Emacs, it takes UTF-8 for MacRoman
        environment.pop("LC_ALL", None)
        environment["LC_CTYPE"] = "UTF-8"
    return data, environment


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
