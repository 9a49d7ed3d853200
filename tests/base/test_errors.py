"""Error lines: one line, which moves no cursor and writes to no clipboard."""

from __future__ import annotations

from edgelm.base.errors import EdgeLMError, RequestError, UsageError


def test_no_error_line_reaches_the_terminal_with_control_characters() -> None:
    clipboard = "\x1b]52;c;ZXZpbA==\x07"
    for kind in (EdgeLMError, RequestError, UsageError):
        error = kind(f"the template says: a\n b{clipboard}\x9b2J\u202e\x00", f"try{clipboard}")
        assert str(error) == (
            "the template says: a b\ufffd]52;c;ZXZpbA==\ufffd\ufffd2J\ufffd\ufffd; try\ufffd]52;c;ZXZpbA==\ufffd"
        )
    assert str(RequestError("é 日本 👩‍💻")) == "é 日本 👩‍💻"
