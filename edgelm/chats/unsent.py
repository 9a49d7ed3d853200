"""The texts that chats have not sent, kept for the next run: each process has its own, or two windows would share one.

Owns the names of these settings, and which are left behind. Knows nothing of the file of the chats.
"""

from __future__ import annotations

import os

from edgelm.base.runtime import birth, is_alive

COMMON = "draft"  # of older versions, which have one for all processes


def own_name() -> str:
    """Return the setting of this process. The birth tells it from a later process with its id."""
    return _name(os.getpid())


def is_left(name: str) -> bool:
    """Return whether a setting is an unsent text whose process has ended, or of an earlier chat of this one."""
    kind, _, process = name.partition(" ")
    if kind != COMMON:
        return False
    pid = process.partition(" ")[0]
    if not (pid.isascii() and pid.isdecimal()) or name == own_name():
        return True
    if not is_alive(int(pid)):
        return True
    born = birth(int(pid))  # empty: it cannot be read now, and earlier versions noted none on macOS
    return bool(born) and name not in (f"{COMMON} {pid}", f"{COMMON} {pid} {born}")


def _name(pid: int) -> str:
    return f"{COMMON} {pid} {birth(pid)}".rstrip()
