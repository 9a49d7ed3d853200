"""The commands of the plain chat: those of the full screen that make sense in lines, and a few of its own.

Owns what each asks and tells, in lines, and the lists whose numbers the next command takes. Knows nothing of how
answers are made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.exports import export_chat, file_name, split_export
from edgelm.chats.history import Chat, Message
from edgelm.chats.knowledge.index import GUIDE, Refreshed
from edgelm.chats.store import Store
from edgelm.client.answer_stream import stats_from_json
from edgelm.client.endpoint import ModelEntry
from edgelm.client.reader import names_of, size_words
from edgelm.client.session import Session
from edgelm.tui.commands.table import COMMANDS, Command
from edgelm.tui.dialogs.params import EFFORTS, effort_name, parse_params
from edgelm.tui.lines import short_name
from edgelm.tui.model_names import describe_model, existing, find_model, is_path
from edgelm.tui.plain.answer import figures, note_of
from edgelm.tui.plain.chats import PlainChats
from edgelm.tui.plain.own import own_commands
from edgelm.tui.plain.pull import pull_model
from edgelm.tui.plain.tools import use_tools
from edgelm.tui.prompt.paths import absolute_path, file_to_write, unquoted
from edgelm.tui.prompt.shortening import plan_shortening
from edgelm.tui.tags import with_marks

if TYPE_CHECKING:
    from edgelm.tui.plain.chat import PlainChat

MAX_LISTED = 20  # chats

T = TypeVar("T")

OWN = (  # they replace commands of the same name
    Command("search", "Search all chats; #TAG filters", "WORDS"),
    Command("chats", "List the newest chats"),
    Command("trash", "List the chats deleted in the last 30 days, or bring back one", "[NUMBER]"),
    Command("open", "Open a chat of the last list", "NUMBER"),
    Command("read", "Read the last messages again", "[NUMBER]"),
    Command("pull", "Pull a model from the hub; Ctrl+C stops it and keeps partial files", "NAME"),
    Command("reasoning", "Read the model's reasoning, or stop that"),
    Command("status", "Tell the model and the figures of the last answer"),
    Command("help", "List the commands, or ask about edgelm", "[QUESTION]"),
)
NOTES = (
    "Several lines: end a line with a backslash, or put three double quotes before and after the message.",
    "Ctrl+C stops an answer. At the prompt it quits if pressed twice, and Ctrl+D quits at once.",
)


class PlainCommands:
    """Runs commands. Each takes its argument, which may be empty, and may raise EdgeLMError and KeyboardInterrupt."""

    def __init__(self, chat: PlainChat) -> None:
        self._chat = chat
        self._workspace = chat.workspace
        self._tell = chat.writer.line
        self._chats: list[tuple[int, int | None]] = []  # of the last list: the chat, and a message of it
        self._models: list[str] = []  # of the last list
        self._by_name: dict[str, Callable[[str], None]] = {
            "new": self._new,
            "search": self._search,
            "chats": self._list_chats,
            "open": self._open,
            "read": self._read,
            "model": self._model,
            "pull": self._pull,
            "system": self._system,
            "params": self._params,
            "think": self._think,
            "reasoning": self._toggle_reasoning,
            "know": self._know,
            "tools": lambda argument: use_tools(chat, argument),
            **chat.files.by_name,
            "title": self._title,
            "regenerate": self._regenerate,
            "edit": self._edit,
            "shorten": self._shorten,
            "whole": self._send_whole,
            "export": self._export,
            **PlainChats(chat).by_name,
            "status": self._status,
            **own_commands(chat),
            "help": self._help,
            "quit": self._quit,
        }
        self._table = {command.name: command for command in (*COMMANDS, *OWN)}

    def run(self, name: str, argument: str) -> None:
        """Run a command by its name, or by the beginning of only one."""
        names = [name] if name in self._table else [known for known in self._table if known.startswith(name)]
        if len(names) != 1:
            which = f"/{name} may be {', '.join(f'/{known}' for known in names)}"
            raise RequestError(which if names else f"there is no command /{name}", "" if names else "/help lists them")
        if names[0] not in self._by_name:
            raise RequestError(f"/{names[0]} works on the full screen only")
        self._by_name[names[0]](argument)

    def complete(self, text: str) -> list[str]:
        """Return the commands that a text is the beginning of."""
        return [f"/{name} " for name in self._by_name if text and f"/{name}".startswith(text)]

    @property
    def _session(self) -> Session:
        return self._workspace.session

    def _help(self, argument: str) -> None:
        """Ask about edgelm, with the guide as the knowledge of this question; without one, list the commands."""
        if argument:
            self._chat.send(argument, roots=(GUIDE,))
            return
        for name in self._by_name:
            self._tell(f"{self._table[name].usage}: {self._table[name].help}")
        for note in NOTES:
            self._tell(note)

    def _quit(self, _argument: str) -> None:
        self._chat.leave()

    # Chats

    def _new(self, _argument: str) -> None:
        self._workspace.new_chat()
        self._tell("new chat")

    def _search(self, argument: str) -> None:
        if not argument:
            raise RequestError("there is nothing to search for", "write /search WORDS")
        hits = self._chat.wait(self._workspace.search(argument))
        if not hits:
            self._tell(f"no chat has {argument}")
        self._chats = [(hit.chat.id, hit.message) for hit in hits[:MAX_LISTED]]
        for number, hit in enumerate(hits[:MAX_LISTED], 1):
            snippet = " ".join(re.sub("[\x02\x03]", "", hit.snippet).split())
            text = "" if hit.message is None else f": {snippet}"
            self._tell(f"{number}. {hit.chat.title}{text}")
        if len(hits) > MAX_LISTED:
            self._tell(f"and {len(hits) - MAX_LISTED:,} more; add a word")

    def _list_chats(self, _argument: str) -> None:
        saved = self._chat.wait(self._workspace.read(Store.chats))
        chats = sorted((chat for chat in saved if not chat.archived), key=lambda chat: not chat.pinned)
        if not chats:
            self._tell("there are no chats yet")
        self._chats = [(chat.id, None) for chat in chats[:MAX_LISTED]]
        for number, chat in enumerate(chats[:MAX_LISTED], 1):
            marks = ["pinned" if chat.pinned else "", "open" if chat.id == self._session.chat.id else ""]
            details = [chat.title, _date(chat), with_marks(chat.tags), *marks]
            self._tell(f"{number}. {', '.join(filter(None, details))}")
        if len(chats) > MAX_LISTED:
            self._tell(f"and {len(chats) - MAX_LISTED:,} more; /search WORDS finds them")
        if len(chats) < len(saved):
            self._tell(f"and {len(saved) - len(chats):,} in the archive; /search finds them")

    def _open(self, argument: str) -> None:
        chat_id, message_id = _numbered(argument, self._chats, "chat", "/chats or /search WORDS lists them")
        if not self._chat.wait(self._workspace.open_chat(chat_id, message_id)):
            raise RequestError("this chat is gone")
        path = self._session.tree.path()
        self._tell(f"{self._session.chat.title}, messages: {len(path)}")
        place = next((i for i, message in enumerate(path) if message.id == message_id), len(path) - 1)
        self._read_messages(path[max(place - (path[place].role == "assistant"), 0) : place + 1] if path else [])

    def _read(self, argument: str) -> None:
        count = int(argument) if argument.isdecimal() else 1
        path = self._session.tree.path()
        if not path:
            raise RequestError("there is nothing to read yet", "write a message")
        self._read_messages(path[-count:] if count else [])

    def _read_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            author = "you" if message.role == "user" else short_name(message.model) or "assistant"
            self._tell(f"{author}: {message.text.strip()}")
            self._chat.files.tell(message.attachments)
            if message.role == "assistant" and (note := note_of(message)):
                self._tell(note)

    def _title(self, argument: str) -> None:
        title = " ".join(self._given(argument, "title: ", self._session.chat.title).split())
        if title and title != self._session.chat.title:
            self._session.rename(title)
        self._tell(f"title: {self._session.chat.title}")

    def _export(self, argument: str) -> None:
        session = self._session
        form, name = split_export(argument)
        if not session.tree.messages:
            raise RequestError("there is nothing to export yet", "write a message")
        path = file_to_write(name or file_name(session.chat, form))
        if path.exists() and not self._chat.lines.confirm(f"{path} exists; replace it?"):
            return
        try:
            path.write_text(export_chat(form, session.chat, session.tree), encoding="utf-8")
        except OSError as error:
            raise EdgeLMError(f"{path} cannot be written: {error.strerror}", "choose another file") from error
        self._tell(f"written to {path}")

    # Models

    def _model(self, argument: str) -> None:
        workspace = self._workspace
        models = self._chat.wait_long("connecting", workspace.link.models(again=True))
        if not argument:
            self._list_models(models)
            return
        if argument.isdecimal() and self._models:
            name = _numbered(argument, self._models, "model", "/model lists them")
        elif is_path(path := unquoted(argument)):
            name = self._chat.wait(workspace.offered(path))
        else:
            name = find_model(models, argument, can_pull=workspace.link.remote is None)
        workspace.set_model(name)
        self._tell(f"model: {short_name(name)}")

    def _list_models(self, models: Sequence[ModelEntry]) -> None:
        recent = existing(self._workspace.recent_paths) if self._workspace.link.remote is None else []
        self._models = list(dict.fromkeys([*(model.id for model in models), *recent]))
        for number, model in enumerate(models, 1):
            current = "this chat's" if model.id == self._workspace.model else ""
            details = [short_name(model.id), *describe_model(model), current]
            self._tell(f"{number}. {', '.join(filter(None, details))}")
        for number, path in enumerate(self._models[len(models) :], len(models) + 1):
            current = ", this chat's" if path == self._workspace.model else ""
            self._tell(f"{number}. {path}, recent{current}")
        pull = ", /pull NAME gets another" if self._workspace.link.remote is None else ""
        self._tell(f"/model NUMBER chooses one{pull}" if models else f"the endpoint offers no model{pull}")

    def _pull(self, argument: str) -> None:
        if self._workspace.link.remote is not None:
            raise RequestError(f"these are the models of {self._workspace.link.remote}: pull more there")
        pull_model(self._chat, argument)

    # Settings

    def _system(self, argument: str) -> None:
        before = self._session.chat.system
        text = self._given(argument, "system prompt: ", before)
        if text != before:
            self._session.set_system(text)
            self._tell("system prompt set" if text else "no system prompt")
        else:
            self._tell(f"system prompt: {text}" if text else "no system prompt")

    def _params(self, argument: str) -> None:
        session = self._session
        if argument:
            session.set_sampling(parse_params(argument, session.chat.sampling))
        values = {**self._workspace.defaults.sampling, **session.chat.sampling}
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        self._tell(f"this chat: {shown}" if shown else "this chat: the endpoint's defaults")

    def _think(self, argument: str) -> None:
        session = self._session
        name = argument.lower()
        if name and name not in EFFORTS:
            raise RequestError(f"there is no effort {name!r}", "give " + ", ".join(EFFORTS))
        if name:
            session.set_sampling(parse_params(f"reasoning_effort={name}", session.chat.sampling))
        current = effort_name(session.chat.sampling.get("reasoning_effort"))
        self._tell(f"this chat: thinking {current}" + ("" if name else f"; give {', '.join(EFFORTS)}"))

    def _toggle_reasoning(self, _argument: str) -> None:
        self._chat.reads_reasoning = not self._chat.reads_reasoning
        self._tell("reasoning is read" if self._chat.reads_reasoning else "reasoning is not read")

    def _status(self, _argument: str) -> None:
        workspace = self._workspace
        self._tell(f"model: {short_name(workspace.model) or 'none'}")
        self._tell(f"endpoint: {workspace.link.remote or 'this machine'}")
        measured = [message.stats for message in self._session.tree.path() if message.stats]
        stats = stats_from_json(measured[-1]) if measured else None
        for figure in figures(stats) if stats is not None else ():
            self._tell(figure)
        if problem := workspace.store.problem:
            self._chat.writer.error(f"not saved: {problem}")

    # Knowledge

    def _know(self, argument: str) -> None:
        verb, _, path = argument.partition(" ")
        session = self._session
        if verb == "off":
            self._forget(session, path.strip())
        elif argument:
            root = argument if argument == GUIDE else absolute_path(argument)
            refreshed = self._refresh(root)
            if not refreshed.num_passages:
                reason = refreshed.left_out[0].reason if refreshed.left_out else "it is empty"
                raise RequestError(f"there is nothing to read in {root}: {reason}", "give text, Markdown or code")
            session.add_knowledge(root)
            self._tell(_known(root, refreshed))
        elif not session.chat.knowledge:
            raise RequestError("this chat has no knowledge", "/know PATH adds a file or folder")
        else:
            for root in session.chat.knowledge:
                try:
                    self._tell(f"{root}: {_known(root, self._refresh(root))}")
                except EdgeLMError as error:
                    self._chat.writer.error(error)

    def _forget(self, session: Session, path: str) -> None:
        known = session.chat.knowledge
        if not known:
            raise RequestError("this chat has no knowledge", "/know PATH adds a file or folder")
        root = path if path in known else absolute_path(path) if path else ""
        if root and root not in known:
            raise RequestError(f"{root} is no knowledge of this chat", "/know shows what is")
        roots = (root,) if root else known
        session.remove_knowledge(roots)
        self._tell(f"{names_of(roots)} will not be read any more")

    def _refresh(self, root: str) -> Refreshed:
        """Index new and changed files."""
        activity = f"reading {names_of((root,))}"
        work = self._chat.reader.thread.run(lambda knowledge: knowledge.refresh((root,)), lambda _: None, activity)
        return self._chat.wait_long(activity, work)

    # Messages

    def _regenerate(self, _argument: str) -> None:
        path = self._session.tree.path()
        if not path:
            raise RequestError("there is nothing to answer yet", "write a message")
        self._answer_again(path[-1])

    def _answer_again(self, message: Message, sent_from: int | None = None) -> None:
        question = message.id if message.role == "user" else message.parent
        assert question is not None, "an answer has a question"
        self._chat.answer(lambda: self._workspace.begin_answer(question, sent_from))

    def _edit(self, _argument: str) -> None:
        path = self._session.tree.path()
        message = next((message for message in reversed(path) if message.role == "user"), None)
        if message is None:
            raise RequestError("there is nothing to edit yet", "write a message")
        lines = self._chat.lines
        if not lines.can_prefill:
            self._tell(f"your last message: {message.text}")
        try:
            text = lines.message("new version: ", message.text)
        except EOFError:
            text = ""
        if text.strip():
            self._chat.send(text, edited=message.id)
        else:
            self._tell("not edited")

    def _shorten(self, _argument: str) -> None:
        """Leave out the oldest messages; where the last answer is not complete, write a new one."""
        session = self._session
        models = self._chat.wait_long("connecting", self._workspace.link.models())
        context = next((model.context for model in models if model.id == self._workspace.model), None)
        plan = plan_shortening(session, context)
        if plan is None or plan.proposed == plan.first:
            raise RequestError("there is nothing to leave out", "the last message alone is shortened by /edit")
        count, freed = plan.left_out(plan.proposed)
        first = plan.exchanges[plan.proposed].messages[0]
        self._tell(f"{count:,} messages would be left out, up to the one before: {' '.join(first.text.split())[:60]}")
        if not self._chat.lines.confirm(f"that frees about {freed:,} tokens; go on without them?"):
            return
        leaf = session.tree.path()[-1]
        if leaf.role == "user" or leaf.state == "failed" or leaf.note == "context":
            self._answer_again(leaf, first.id)
        else:
            session.shorten(leaf, first.id)
            self._tell("they are left out; /whole sends all messages again")

    def _send_whole(self, _argument: str) -> None:
        if not self._session.send_all():
            raise RequestError("the whole conversation is sent already", "/shorten leaves out the oldest messages")
        self._tell("the whole conversation is sent again")

    def _given(self, argument: str, prompt: str, current: str) -> str:
        """Return the argument; without one, the present text as the user edits it, or as it is where nobody can."""
        if argument or not self._chat.lines.can_prefill:
            return argument or current
        try:
            return self._chat.lines.line(prompt, current).strip()
        except EOFError:
            return current


def _numbered(argument: str, items: Sequence[T], noun: str, hint: str) -> T:
    """Return the item of a list that a number names. Raises RequestError."""
    if not argument.isdecimal() or not 1 <= int(argument) <= len(items):
        raise RequestError(f"there is no {noun} {argument}".rstrip(), hint)
    return items[int(argument) - 1]


def _known(root: str, refreshed: Refreshed) -> str:
    """Return a line about the files that are read in a file or folder."""
    left_out = f", {len(refreshed.left_out):,} files left out" if refreshed.left_out else ""
    return f"{names_of((root,))}: {size_words(refreshed)}{left_out}"


def _date(chat: Chat) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.changed))
