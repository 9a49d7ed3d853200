"""The formats in which a chat is written to a file: Markdown, JSON and HTML.

Owns their names and the names of files. Knows nothing of where files are.
"""

from __future__ import annotations

from edgelm.base.errors import RequestError
from edgelm.chats.export_json import to_json
from edgelm.chats.export_md import to_markdown
from edgelm.chats.formats import FORMATS, Format
from edgelm.chats.history import Chat, Tree


def export_chat(form: Format, chat: Chat, tree: Tree) -> str:
    """Return a chat in a format: Markdown and HTML have the branch on screen, JSON has all branches."""
    if form == "html":
        from edgelm.chats.export_html import to_html  # its imports take 0.1 s

        return to_html(chat, tree)
    return to_json(chat, tree) if form == "json" else to_markdown(chat, tree)


def split_export(argument: str) -> tuple[Format, str]:
    """Split the argument of `/export` into a format and a file name, which may be empty.

    Without a format, the ending of the file name chooses it; a word that is neither a format nor looks like a file is
    refused. Raises RequestError.
    """
    first, _, name = argument.partition(" ")
    for form in FORMATS:
        if first == form:
            return form, name.strip()
    name = argument.strip()
    if name and "." not in name and "/" not in name:
        formats = ", ".join(FORMATS)
        raise RequestError(f"{name!a} is no format", f"give {formats}, a format and a file, or a file such as chat.md")
    by_ending = (form for form in FORMATS if argument.lower().endswith(f".{form}"))
    return next(by_ending, "md"), argument.strip()


def file_name(chat: Chat, suffix: str) -> str:
    """Return a file name for a chat: its title without characters that some file system refuses."""
    words = "".join(character if character.isalnum() else "-" for character in chat.title.lower())
    stem = "-".join(part for part in words.split("-") if part)[:50].strip("-")
    return f"{stem or 'chat'}.{suffix}"
