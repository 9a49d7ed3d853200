"""The choice of a file for the @word before the cursor, in the list above the prompt.

Owns when the list opens, and what becomes of the @word. Knows nothing of how files are matched and read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.chats.attached_files import full_path
from edgelm.chats.folders import MAX_WALK_S
from edgelm.tui.commands.table import Suggestion
from edgelm.tui.prompt.box import Completion, Prompt
from edgelm.tui.prompt.file_list import FileList, word_before

Place = tuple[int, int]  # row and column
WAIT_S = MAX_WALK_S + 2.0  # for the files of a slow disk, with the keys behind Enter or Tab


class FilePicker:
    """Lists files while the cursor is behind an @word. `attach` gets the absolute path of the one that is taken."""

    def __init__(
        self,
        prompt: Prompt,
        completion: Completion,
        attach: Callable[[str], None],
        run: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._prompt = prompt
        self._completion = completion
        self._attach = attach
        self._run = run
        self._files: FileList | None = None  # of the list that is open
        self._asked: str | None = None  # the word that files were last looked for
        self._ended = asyncio.Event()  # that look
        self._pending: bool | None = None  # take its first file; True: open it if it is a folder
        self._listed: str | None = None  # the word that the list shows the files for
        self._left: Place | None = None  # the @word that the user closed the list for

    def typed(self) -> bool:
        """Take note of a change of the text; return whether the list shows files."""
        place, word = self._word()
        if place is None or place == self._left:
            if place is None:
                self._left = None
            was_picking, self._files = self._prompt.picking, None
            self._prompt.picking = False
            if was_picking:
                self._completion.show_for(self._prompt.text, [])
                self._prompt.completing = False
            return False
        self._left = None
        if self._files is None:
            self._files, self._asked, self._listed = FileList(), None, None
        self._prompt.picking = True
        self._prompt.offering = False
        if word != self._asked or (self._ended.is_set() and word != self._listed):
            self._asked, self._ended, self._pending = word, asyncio.Event(), None
            self._run(self._list(self._files, word, self._ended))
        return True

    def leave(self) -> None:
        """Keep the list closed for the present @word."""
        if self._prompt.picking:
            self._left, _ = self._word()
            self._files = None
            self._prompt.picking = self._prompt.completing = False

    async def take(self, *, opens: bool) -> bool:
        """Attach the chosen file, or the first once they are listed; `opens`: of a folder, list what it holds.

        Return whether the key was for a file. The prompt reads its next key behind it: keys are faster than the disk.
        """
        if not self.typed() or self._files is None:
            return False
        _, word = self._word()
        if self._listed != word:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WAIT_S)
            if not self._prompt.picking or self._word()[1] != word:  # the list was closed meanwhile
                return True
            if self._listed != word:
                self._pending = opens
                return True
        chosen = self._completion.chosen
        if chosen is None:  # no file fits: the word is a word
            self.leave()
            return opens
        self._choose(chosen, opens=opens and chosen.help != "this folder")
        self.typed()
        return True

    def click(self, suggestion: Suggestion) -> None:
        """Attach a clicked file, or open a clicked folder, whose first line attaches it."""
        self._choose(suggestion, opens=suggestion.help == "folder")

    def _choose(self, suggestion: Suggestion, *, opens: bool) -> None:
        place, word = self._word()
        if place is None:
            return
        end = (place[0], place[1] + 1 + len(word))
        if opens and suggestion.text.endswith("/"):
            self._prompt.replace(f"@{suggestion.text}", place, end)
            self._prompt.move_cursor((place[0], place[1] + 1 + len(suggestion.text)))
            return
        self._prompt.replace("", place, end)
        self._prompt.move_cursor(place)
        with suppress(EdgeLMError):  # a home that is not known
            self._attach(full_path(suggestion.text))

    async def _list(self, files: FileList, word: str, ended: asyncio.Event) -> None:
        try:
            suggestions = await in_daemon_thread(lambda: files.matches(word))
            if files is not self._files or self._word()[1] != word:
                return
            self._listed = word
            self._completion.show_for(f"@{word}", suggestions)
            self._prompt.completing = bool(suggestions)
        finally:
            ended.set()
        opens, self._pending = self._pending, None
        if opens is not None and not await self.take(opens=opens):
            self._send()

    def _send(self) -> None:
        if self._prompt.text:  # it may be sent already
            self._prompt.action_send()

    def _word(self) -> tuple[Place | None, str]:
        """Return the place of the @word before the cursor, and the word without its @.

        None in a command, and in a text of the history: it was sent with these words.
        """
        text = self._prompt.text
        if (text.startswith("/") and not text.startswith("//")) or self._prompt.sent.shows(text):
            return None, ""
        row, column = self._prompt.cursor_location
        match = word_before(self._prompt.document.get_line(row)[:column])
        if match is None or self._prompt.selection.start != self._prompt.selection.end:
            return None, ""
        return (row, match[0]), match[1]
