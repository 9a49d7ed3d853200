"""Which unsent texts are left behind."""

from __future__ import annotations

import subprocess
import sys

from edgelm.chats.unsent import is_left


def test_the_text_of_an_earlier_version_on_macos_stays_with_its_window() -> None:
    """It has no birth in its name."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as window:
        assert not is_left(f"draft {window.pid}")
        window.communicate(b"\n")
    assert is_left(f"draft {window.pid}")
