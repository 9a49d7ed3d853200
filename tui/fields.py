"""The fields in which a text is written. Whatever a text has, an earlier message say, no field writes control
characters to the terminal.

Knows nothing of what the texts are for.
"""

from __future__ import annotations

from typing import Any

from textual.widgets import Input, TextArea
from textual.widgets.text_area import Edit, EditResult

from edgelm.tui.control_codes import clean_text


class LineField(Input):
    """A field of one line."""

    def validate_value(self, value: str) -> str:
        return clean_text(value).replace("\n", " ").replace("\t", " ")


class TextField(TextArea):
    """A field of several lines."""

    def __init__(self, text: str = "", **options: Any) -> None:
        super().__init__(clean_text(text), **options)

    def load_text(self, text: str) -> None:
        super().load_text(clean_text(text))

    def edit(self, edit: Edit) -> EditResult:
        edit.text = clean_text(edit.text)
        return super().edit(edit)
