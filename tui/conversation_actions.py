"""What the commands about the sent conversation do: shorten it, send all of it, tint what was drafted.

Owns one function for each. Knows the screen; nothing of widgets' insides.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from edgelm.errors import EdgeLMError, RequestError
from edgelm.tui.shortening import ShortenScreen, plan_shortening

if TYPE_CHECKING:
    from edgelm.chats.model import Message
    from edgelm.tui.screen import ChatScreen


async def shorten(screen: ChatScreen, _argument: str) -> None:
    """Go on without the oldest messages: with a new answer where there is none that is whole."""
    screen.require_no_answer()
    session = screen.session
    shortening = plan_shortening(session, await _context(screen))
    if shortening is None:
        raise RequestError("there is nothing to leave out", "the last message alone is shortened by editing it: F4")
    first = await screen.app.push_screen_wait(ShortenScreen(shortening))
    if first is None or screen.session is not session or screen.answer is not None:
        return
    leaf = session.tree.path()[-1]
    sent_from = shortening.exchanges[first].messages[0].id if first else None
    if sent_from is None:
        session.send_all()
    if not _is_whole(leaf):
        parent = leaf.id if leaf.role == "user" else leaf.parent
        assert parent is not None, "an answer has a question"
        screen.begin_answer(parent, sent_from)
    elif sent_from is not None:
        session.shorten(leaf, sent_from)
    screen.exchange()
    screen.prompt.focus()


async def send_all(screen: ChatScreen, _argument: str) -> None:
    """Send the whole conversation again."""
    screen.require_no_answer()
    if not screen.session.send_all():
        raise RequestError("the whole conversation is sent already", "/shorten leaves out the oldest messages")
    screen.exchange()
    screen.notify("the whole conversation is sent again")


async def drafts(screen: ChatScreen, _argument: str) -> None:
    """Tint what was drafted in the answers, or no more."""
    screen.show_drafts(not screen.shows_drafts)
    if screen.shows_drafts and not any(screen.drafted.values()):
        screen.notify("drafted words will be tinted, in answers from now on")
    else:
        screen.notify("drafted words are tinted" if screen.shows_drafts else "no tint")


def _is_whole(leaf: Message) -> bool:
    """Say whether the branch ends with an answer that is not to be written again."""
    return leaf.role == "assistant" and leaf.state != "failed" and leaf.note != "context"


async def _context(screen: ChatScreen) -> int | None:
    """Return the tokens that the model's context holds, as far as the endpoint says."""
    if screen.link.connected is None:
        return None
    model = screen.status.status.model
    with suppress(EdgeLMError):
        return next((each.context for each in await screen.link.models() if each.id == model), None)
    return None
