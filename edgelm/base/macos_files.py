"""Files that macOS leaves in any folder, and that are no part of a model.

    ._NAME        attributes of NAME, on disks that have no place for them: exFAT, SMB
    .DS_Store     how Finder shows the folder

Owns their names.
"""

from __future__ import annotations


def is_macos_file(name: str) -> bool:
    """Return whether macOS wrote a file of this name, without its folder, for itself."""
    return name.startswith("._") or name == ".DS_Store"
