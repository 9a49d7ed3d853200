"""Titles of chats from their own model, asked for while nothing else is to be done.

Owns when a title is asked for, the request, and which answers are titles. Only an edgelm endpoint is asked, where a
title costs nobody money, and not the starter, which quotes the guide. Knows nothing of how titles are shown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from edgelm.base.errors import EdgeLMError
from edgelm.chats.history import TITLE_LEN
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.json_values import mapping
from edgelm.client.session import Session
from edgelm.client.turns import Turn
from edgelm.client.work import Work
from edgelm.library.names import STARTER
from edgelm.tui.lines import clean
from edgelm.tui.workspace import Workspace

IDLE_S = 2.0  # without an answer before a title is asked for
BUSY_S, NUM_LOOKS = 10.0, 30  # between two looks at an endpoint that works for others, and how many
MAX_WORDS = 10
QUESTION_CHARS, ANSWER_CHARS = 600, 400  # a short prompt takes little of the prefix cache
TASK = "Write a title for this conversation: at most six words, in its language. Reply with the title only."
OPTIONS: dict[str, float | int | str] = {"temperature": 0, "max_tokens": 24, "reasoning_effort": "none"}

_REFUSAL = re.compile(r"(?i)(i'?m sorry|sorry,|i can(?:'?t|not)\b|i am (?:unable|sorry)|as an ai\b)")
_LABEL = re.compile(r"(?i)^(?:#+\s*)?(?:[*_]*)(?:chat |conversation )?title(?:[*_]*)\s*[:\-]\s*")
_THOUGHT = re.compile(r"(?s)^\s*<think>.*?</think>")
_TASK_WORDS = frozenset(re.findall(r"\w+", TASK.lower()))
_MARKUP = "#*_`>\"'“”„«»\u2018\u2019 "


class Titles:
    """Asks for titles of chats whose answers have ended. `run` starts a worker, `show` shows a chat's new title."""

    def __init__(
        self, workspace: Workspace, run: Callable[[Coroutine[Any, Any, None]], Work], show: Callable[[int], None]
    ) -> None:
        self._workspace = workspace
        self._run = run
        self._show = show
        self._waiting: dict[int, Session] = {}  # by chat
        self._asked: set[int] = set()  # chats that were asked about: once in a run
        self._work: Work | None = None
        workspace.answer_started = self.stop

    def answer_ended(self, session: Session) -> None:
        """Ask for the titles that are missing in some seconds, unless the user goes on."""
        self.stop()
        if _lacks_title(session) and session.chat.id not in self._asked:
            self._waiting[session.chat.id] = session
        if self._waiting and not self._workspace.answers:
            self._work = self._run(self._ask_for_all())

    def stop(self) -> None:
        """Ask for none now: an answer begins. An endpoint ends a request whose connection is closed."""
        if self._work is not None:
            self._work.cancel()
            self._work = None

    async def _ask_for_all(self) -> None:
        await asyncio.sleep(IDLE_S)
        with suppress(EdgeLMError):  # the cut titles stay
            for chat_id, session in list(self._waiting.items()):
                if chat_id not in self._workspace.chats or session.chat.renamed:  # deleted or named meanwhile
                    del self._waiting[chat_id]
                    continue
                model = session.tree.path()[-1].model
                client = self._workspace.link.connected
                if client is None or not client.is_edgelm or not await _gets_idle(client, model):
                    return
                await self._ask(client, chat_id, session, model)

    async def _ask(self, client: Client, chat_id: int, session: Session, model: str) -> None:
        title = ""
        with suppress(EdgeLMError):
            title = await ask_for_title(client, session, model)
        self._asked.add(chat_id)
        del self._waiting[chat_id]
        chat = self._workspace.chats.get(chat_id)
        if title and chat is not None and not chat.renamed:
            self._workspace.change_chat(chat_id, title=title, summarized=True)
            self._show(chat_id)


async def ask_for_title(client: Client, session: Session, model: str) -> str:
    """Return a title for a chat from a model; empty where it gave none. Raises EdgeLMError."""
    question, answer = session.tree.path()[:2]
    text = f"User: {question.text[:QUESTION_CHARS]}\n\nAssistant: {answer.text[:ANSWER_CHARS]}"
    reply = await client.answer_at_once(ChatRequest(model, (Turn("user", f"{text}\n\n---\n{TASK}"),), OPTIONS))
    choices = reply.get("choices")
    choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
    content = mapping(choice.get("message")).get("content")
    return clean_title(content, cut=choice.get("finish_reason") == "length") if isinstance(content, str) else ""


async def _gets_idle(client: Client, model: str) -> bool:
    """Wait until the endpoint has the model loaded and works for nobody; return False where that takes too long."""
    for _ in range(NUM_LOOKS):
        if await client.is_idle(model):
            return True
        await asyncio.sleep(BUSY_S)
    return False


def clean_title(text: str, *, cut: bool = False) -> str:
    """Return the title in a model's reply; empty where there is none. `cut`: the reply is not complete."""
    text = _THOUGHT.sub("", text)
    line = next((line for line in text.splitlines() if line.strip(_MARKUP)), "")
    title = _LABEL.sub("", " ".join(line.split())).strip(_MARKUP).rstrip(".:").strip(_MARKUP)
    is_words = any(character.isalpha() for character in title) and clean(title) == title
    too_long = len(title) > TITLE_LEN or len(title.split()) > MAX_WORDS or (cut and text.strip() == line.strip())
    is_echo = _TASK_WORDS.issuperset(re.findall(r"\w+", title.lower()))  # small models repeat what they were asked
    return "" if not is_words or is_echo or too_long or "<" in title or _REFUSAL.match(title) else title


def _lacks_title(session: Session) -> bool:
    """Tell whether a chat has an answer, of a model that can give titles, and no title but the cut one."""
    chat, path = session.chat, session.tree.path()
    if chat.renamed or chat.summarized or len(path) < 2 or not path[1].text.strip():
        return False
    return path[-1].role == "assistant" and path[-1].state == "done" and path[-1].model not in ("", STARTER)
