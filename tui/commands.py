"""The commands, in one table: `/name` in the prompt, the command palette and F1 show the same set.

Owns names, arguments and help. Knows nothing of what they do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One command. The screen's method `do_NAME` takes its argument, which may be empty."""

    name: str
    help: str
    argument: str = ""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS = (
    Command("new", "Start a new chat"),
    Command("search", "Search all chats", "[WORDS]"),
    Command("model", "Choose the model of this chat, or pull one", "[NAME]"),
    Command("system", "Set the system prompt of this chat", "[TEXT]"),
    Command("params", "Set how this chat is sampled", "[NAME=VALUE …]"),
    Command("title", "Rename the chat", "[TITLE]"),
    Command("pull", "Pull a model from the hub; stop: what came is kept", "[NAME|stop]"),
    Command("regenerate", "Answer again; the old answer is kept"),
    Command("edit", "Edit your last message; the old one is kept"),
    Command("shorten", "Go on without the oldest messages"),
    Command("whole", "Send the whole conversation again"),
    Command("drafts", "Tint the drafted words of answers since the start"),
    Command("copy", "Copy the last answer"),
    Command("code", "Copy a block of code", "[NUMBER]"),
    Command("export", "Write the chat to a file", "[md|json] [FILE]"),
    Command("delete", "Delete the chat"),
    Command("theme", "Choose the colours", "[NAME]"),
    Command("help", "Show every key and command"),
    Command("quit", "Leave"),
)

_CALL = re.compile(r"/([a-z]+)(?:\s+(.*))?\s*", re.DOTALL)


def find_command(name: str) -> Command | None:
    """Return a command by its name, or by a beginning that only one has."""
    starting = [command for command in COMMANDS if command.name.startswith(name)]
    return next((each for each in starting if each.name == name), starting[0] if len(starting) == 1 else None)


def parse_call(text: str) -> tuple[str, str] | None:
    """Return the name and argument of a text that calls a command; None where it is a message.

    `/etc/hosts is empty` is a message, and so is what begins with two slashes (one is dropped).
    """
    match = _CALL.fullmatch(text)
    return (match[1], (match[2] or "").strip()) if match else None


def complete(text: str) -> list[Command]:
    """Return the commands that a text may become."""
    if not re.fullmatch(r"/[a-z]*", text):
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:])]
