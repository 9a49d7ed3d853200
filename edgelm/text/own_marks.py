"""Control tokens in messages that we write ourselves: calls as text, for a template that has no calls.

While the template runs, one rare character stands for each. It is in no text of the request, so that a control string
in such a text, also in the arguments of a call, stays text. Owns these characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from edgelm.text.calls.format import CallFormat
from edgelm.text.calls.reader import changed_format
from edgelm.text.patterns import any_of
from edgelm.text.pictures import texts_in

_MARKS = range(0x31350, 0x323B0)  # as rare as the placeholders of chat.py: CJK extension H
_RARE = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")


def with_own_marks(form: CallFormat, controls: Collection[str], *texts: object) -> tuple[CallFormat, dict[str, str]]:
    """Return a format with a rare character for each control string in it, and what the characters stand for.

    `texts` is all that a client sent for the template.
    """
    strings = sorted(text for text in controls if any(text in own for own in form.strings))
    if not strings:
        return form, {}
    joined = "\n".join(texts_in(texts))
    taken, escapes = frozenset(_RARE.findall(joined)), joined.lower() if "\\u" in joined else ""
    free = (char for char in map(chr, _MARKS) if char not in taken and json.dumps(char)[1:-1] not in escapes)
    chars = dict(zip(strings, free, strict=False))
    pattern = any_of(chars)
    marked = changed_format(form, lambda text: pattern.sub(lambda match: chars[match[0]], text))
    return marked, {char: text for text, char in chars.items()}
