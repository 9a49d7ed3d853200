"""The short names of chats on the command line, such as `kdvtr`, and the chats that they name.

A chat's id is a time: its first digits are those of every other chat of that week. A handle is the id with its bits
mixed, in letters without vowels, so a few letters name one chat, and no handle looks like a number or a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgelm.base.errors import RequestError
from edgelm.chats.history import Chat
from edgelm.chats.printable import printable

LETTERS = "bcdfghjkmnpqrstvwxz"
LEAST_LEN = 5
_BITS = 63
_MIX = 0x5851F42D4C957F2D  # odd, so that the product is another one for each id
_LEN = 15  # letters that hold 63 bits
MAX_NAMED = 5  # chats in an error


def handle(chat_id: int) -> str:
    """Return the whole handle of a chat."""
    mixed = (chat_id * _MIX) % 2**_BITS
    mixed = ((mixed ^ mixed >> 32) * _MIX) % 2**_BITS
    letters = []
    for _ in range(_LEN):
        mixed, letter = divmod(mixed, len(LETTERS))
        letters.append(LETTERS[letter])
    return "".join(letters)


def short_handles(chats: Iterable[Chat]) -> dict[int, str]:
    """Return for each chat the beginning of its handle that names it alone among these chats."""
    handles = sorted((handle(chat.id), chat.id) for chat in chats)
    short: dict[int, str] = {}
    for place, (name, chat_id) in enumerate(handles):
        beside = [handles[i][0] for i in (place - 1, place + 1) if 0 <= i < len(handles)]
        shared = max((_num_shared(name, other) for other in beside), default=0)
        short[chat_id] = name[: max(shared + 1, LEAST_LEN)]
    return short


def find_chat(name: str, chats: Sequence[Chat]) -> Chat:
    """Return the chat that a name means: `last`, the beginning of a handle, or a part of the title that only one has.

    `last` is the chat that changed last and is not archived or deleted; `chats` are the newest first. Raises
    RequestError.
    """
    if name == "last":
        last = next((chat for chat in chats if not chat.archived and chat.deleted is None), None)
        if last is None:
            raise RequestError("there are no chats yet", "`edgelm` starts one")
        return last
    wanted = name.strip().casefold()
    matches = [chat for chat in chats if wanted and handle(chat.id).startswith(wanted)]
    if not matches:
        matches = [chat for chat in chats if wanted == chat.title.casefold()]
    if not matches:
        matches = [chat for chat in chats if wanted and wanted in chat.title.casefold()]
    if not matches:
        raise RequestError(f"there is no chat {name!r}", "`edgelm chats list` shows them")
    if len(matches) > 1:
        short = short_handles(chats)
        named = ", ".join(f"{short[chat.id]} ({printable(chat.title)})" for chat in matches[:MAX_NAMED])
        more = f" and {len(matches) - MAX_NAMED} more" if len(matches) > MAX_NAMED else ""
        raise RequestError(f"{name!r} is {len(matches)} chats: {named}{more}", "give one of these names")
    return matches[0]


def _num_shared(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
