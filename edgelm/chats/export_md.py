"""A chat as Markdown: the branch on screen, as somebody reads it.

Owns the words for how an answer ended, which the page of HTML uses too. Knows nothing of files.
"""

from __future__ import annotations

from edgelm.chats.attachments import Attachment, as_markdown
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.tool_calls import with_calls

ENDS = {  # of an answer, by its note or its state
    "length": "ended at the limit of tokens",
    "context": "ended because the context was full",
    "content_filter": "ended by the endpoint's filter",
    "stopped": "stopped before its end",
    "streaming": "not finished: edgelm was closed while this was written",
}


def to_markdown(chat: Chat, tree: Tree) -> str:
    """Return the branch on screen as Markdown, with attached texts and the results of tools; answers keep the Markdown
    of the model.
    """
    parts = [f"# {' '.join(chat.title.split())}"]
    if chat.system:
        parts.append(_quoted(chat.system))
    for message in tree.path():
        parts.append(f"## {author_of(message)}")
        parts += map(as_markdown, message.attachments)
        if text := with_calls(message.text, message.calls):
            parts.append(text)
        if end := end_of(message):
            parts.append(f"*{end}*")
    return "\n\n".join(parts) + "\n"


def author_of(message: Message) -> str:
    """Return the heading of a message."""
    if message.role == "user":
        return "You"
    is_path = message.model.startswith("/")
    return (message.model.rsplit("/", 1)[-1] if is_path else message.model) or "Assistant"


def end_of(message: Message) -> str:
    """Return in a few words how an answer ended; empty where it is complete."""
    if message.state == "failed":
        return f"failed: {message.note}" if message.note else "failed"
    return ENDS.get(message.note or message.state, message.note)


def words_of(attachment: Attachment) -> str:
    """Return the name of an attachment, its kind and its size."""
    if attachment.kind == "image":
        return f"{attachment.name} (image, {max(len(attachment.data) // 1024, 1):,} KiB)"
    num_lines = len(attachment.text.splitlines())
    return f"{attachment.name} ({num_lines:,} line{'' if num_lines == 1 else 's'})"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())
