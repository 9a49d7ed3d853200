"""WSL, the Windows Subsystem for Linux: a virtual machine of Windows, whose network and end are Windows' own."""

from __future__ import annotations

import platform


def is_wsl(release: str = "") -> bool:
    """Tell whether a kernel, by default the running one, is WSL's: its release names Microsoft."""
    return "microsoft" in (release or platform.release()).lower()
