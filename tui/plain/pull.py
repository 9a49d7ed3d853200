"""A pull in the plain chat: it is waited for, and Ctrl+C stops it.

Owns what is told of it. The process that pulls is in pulls.py.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.client.work import TaskWork
from edgelm.library.catalog import hub_reference
from edgelm.tui.lines import short_name
from edgelm.tui.model_names import find_pulled
from edgelm.tui.plain.lines import Notices
from edgelm.tui.pulls import Pull, Pulls

if TYPE_CHECKING:
    from edgelm.tui.plain.chat import PlainChat

FIRST_S = 3.0  # to the first line about the progress


def pull_model(chat: PlainChat, name: str) -> None:
    """Pull a model, which then answers the open chat. Raises EdgeLMError."""
    if not name or name == "stop":
        raise RequestError("a pull needs a name", "write /pull NAME; Ctrl+C stops it")
    hub_reference(name)  # raises at once where the name is misspelt
    workspace = chat.workspace
    chat.writer.line(f"pulling {name}")
    try:
        pull = chat.wait(_pulled(chat, name))
    except KeyboardInterrupt:
        chat.writer.line(f"the pull of {name} was stopped; /pull {name} {Pull(name, 0).again}")
        return
    if pull.state == "failed":
        raise EdgeLMError(pull.error)
    model = find_pulled(chat.wait(workspace.link.models(again=True)), pull)
    if model is None:
        chat.writer.line(f"{name} is here, but the endpoint does not list it yet; /model shows its list")
    else:
        workspace.set_model(model)
        place = f" in place of {name}" if pull.stand_in else ""
        chat.writer.line(f"{short_name(model)} is here{place}, and answers this chat from now on")


async def _pulled(chat: PlainChat, name: str) -> Pull:
    """Pull a model, and tell from time to time how far it is."""
    notices = Notices(chat.writer)
    ended = asyncio.Event()

    def tell() -> None:
        for pull in pulls.running:
            notices.show(", ".join(pull.progress), FIRST_S)

    pulls = Pulls(TaskWork, tell, lambda _: ended.set(), chat.pull_command)
    pull = pulls.start(name, chat.workspace.session.chat.id)
    try:
        await ended.wait()
    finally:
        await pulls.end()
    return pull
