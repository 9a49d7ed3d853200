"""Pictures of the chat, compared with those in `__snapshots__`; `pytest --snapshot-update` replaces them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual._context import visible_screen_stack
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import Input, Label, TextArea

from edgelm.base.passages import Passage
from edgelm.chats.history import Chat, Message
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.knowledge.files import LeftOut
from edgelm.chats.knowledge.index import Refreshed
from edgelm.chats.reading import Reading
from edgelm.chats.store import Store
from edgelm.client.answer_stream import AnswerStats, stats_to_json
from edgelm.client.link import Link
from edgelm.client.reader import SendQuestion
from edgelm.client.watching import read_event
from edgelm.library.catalog import entries
from edgelm.tui.app import ChatApp
from edgelm.tui.dialogs.knowledge import Entry, KnowledgeScreen, SendScreen
from edgelm.tui.inspector.view import Inspector
from edgelm.tui.screen import ChatScreen
from edgelm.tui.status import StatusLine
from edgelm.tui.workspace import ChatDefaults
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint

MARCH_2025 = 1_741_000_000.0
FILL_MS = 30_000  # the thread of the app makes the same file, and may be slow
DRAWING = {"folder", "open", "paths", "pictures", "search"}  # workers whose end changes the picture
STATS = AnswerStats(
    prompt_tokens=38, completion_tokens=212, first_token_ms=214.0, tokens_per_second=41.3, drafted=96, accepted=71,
    context_used=250, context_size=4096, engine="llama", device="cpu",
)  # fmt: skip
OTHERS = (
    ("Sourdough for beginners", "How much water for 500 g of flour?", "About **350 g** of water: 70 % hydration."),
    ("Why is the sky blue?", "Why is the sky blue?", "Air scatters *short* waves more: Rayleigh scattering."),
    ("Regular expression for dates", "Match 2025-03-07", "```\n\\d{4}-\\d{2}-\\d{2}\n```"),
    ("Packing list for Norway", "What do I pack?", "Rain clothes. Water is everywhere."),
)


@pytest.fixture(autouse=True)
def no_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starter reads nothing: no picture changes with the guide."""
    monkeypatch.setattr("edgelm.client.reader.STARTER", "no model")


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Path]:
    """Return a runtime folder in which a front can be found."""
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with FakeEndpoint(drafted="aeiou(", events=engine_events()).serve() as endpoint:
            document = {"pid": os.getpid(), "address": endpoint.address}
            (tmp_path / "front.json").write_text(json.dumps(document))
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    yield tmp_path
    ended.set()
    thread.join()


def fill(path: Path) -> None:
    store = Store(path, busy_ms=FILL_MS)
    for i, (title, question, answer) in enumerate((*OTHERS, ("Quicksort in Python", "Explain quicksort", ANSWER))):
        moment = MARCH_2025 + i * 86_400
        chat = Chat(title=title, created=moment, changed=moment)
        user = Message(chat=chat.id, parent=None, role="user", text=question)
        first = Message(chat=chat.id, parent=user.id, role="assistant", text="Sort it.", model="starter")
        answer_message = Message(
            chat=chat.id, parent=user.id, role="assistant", text=answer, model="starter", stats=stats_to_json(STATS)
        )
        chat.leaf = answer_message.id
        store.put_chat(chat)
        for message in (user, first, answer_message):
            store.put_message(message)
    store.close()


@pytest.fixture
def app(front: Path) -> ChatApp:
    link = Link(endpoint=None, api_key=None, runtime=front, log=front / "log")
    return ChatApp(front / "chats.db", link, ChatDefaults())


def keys(*groups: str, theme: str = "textual-dark") -> Any:
    """Return a function that presses keys before the picture, each group when all work of the last one is done."""

    async def run(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, ChatScreen)
        while not screen.query(StatusLine):  # it is called before the screen is composed
            await pilot.pause(0.02)
        await pilot.pause()
        pilot.app.theme = theme
        screen.pane.prompt.cursor_blink = False
        while screen.status.status.activity != "ready" or screen.workers:
            await pilot.pause(0.02)
        for group in groups:
            await pilot.press(*group.split())
            while len(pilot.app.screen_stack) == 1 and screen.workers:
                await pilot.pause(0.02)
            await pilot.pause(0.2)
            await settle(pilot)

    return run


async def settle(pilot: Pilot[None]) -> None:
    """Wait until the picture is the same for a while: on a busy machine, work that was asked for may begin late."""
    for field in pilot.app.screen.query("Input, TextArea"):
        assert isinstance(field, Input | TextArea)
        field.cursor_blink = False
    last, since = None, time.monotonic()
    while last is None or time.monotonic() - since < 0.1:
        picture = rows_of(pilot)
        if picture != last or any(worker.group in DRAWING for worker in pilot.app.workers):
            last, since = picture, time.monotonic()
        await pilot.pause(0.02)


OPEN_QUICKSORT = "ctrl+f down enter"


def test_the_first_start(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(100, 30), run_before=keys())


def test_a_chat_with_code(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(110, 34), run_before=keys(OPEN_QUICKSORT))


def test_a_chat_in_a_light_theme(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(110, 34), run_before=keys(OPEN_QUICKSORT, theme="textual-light"))


def test_a_chat_in_16_colours(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(110, 34), run_before=keys(OPEN_QUICKSORT, theme="ansi-dark"))


def fill_thoughts(path: Path) -> None:
    """Write a chat with a thought before each answer, the second one stopped inside it."""
    store = Store(path, busy_ms=FILL_MS)
    chat = Chat(title="Marbles", created=MARCH_2025, changed=MARCH_2025)
    store.put_chat(chat)
    parent = None
    stats = replace(STATS, reasoning_ms=12_300.0, reasoning_tokens=340)
    for question, text, saved in (
        ("Three bags of 12 marbles, one is half empty. How many?", "There are **30** marbles.", stats),
        ("And with seven bags?", "", AnswerStats(reasoning_ms=65_000.0)),
    ):
        user = Message(chat=chat.id, parent=parent, role="user", text=question)
        answer_message = Message(
            chat=chat.id, parent=user.id, role="assistant", text=text, model="starter", stats=stats_to_json(saved),
            reasoning="The full bags come first.\n\n- A full bag has 12 marbles, so two have 24.\n- Half a bag has 6, "
            "and 24 + 6 is 30, which I check once more by counting them in another order.\n",
        )  # fmt: skip
        if not text:
            answer_message.state = "stopped"
        store.put_message(user)
        store.put_message(answer_message)
        parent = answer_message.id
    chat.leaf = parent
    store.put_chat(chat)
    store.close()


@pytest.mark.parametrize("pressed", [(), ("ctrl+t",), ("shift+tab up up enter",)], ids=["folded", "unfolded", "one"])
def test_thoughts(app: ChatApp, front: Path, pressed: tuple[str, ...], snap_compare: Any) -> None:
    fill_thoughts(front / "chats.db")
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys(OPEN_QUICKSORT, *pressed))


def fill_readings(path: Path) -> None:
    """Write a chat with what was read for its questions; nothing was read for the last one."""
    store = Store(path, busy_ms=FILL_MS)
    chat = Chat(title="The GPU", created=MARCH_2025, changed=MARCH_2025, knowledge=("/srv/notes",))
    store.put_chat(chat)
    parent = None
    passages = (
        Passage("README.md", "Install", "## Install\n\nRun `make all`, then `make check`."),
        Passage("docs/gpu.md", "Memory › What a model takes", "A model of 8 B takes **5 GB**.\n\n- KV: 1 GB"),
    )
    for question, text, reading in (
        ("How much memory does it need?", "About **6 GB** [2].", Reading(chat.knowledge, passages)),
        ("Who was Ada Lovelace?", "A mathematician.", Reading(chat.knowledge, note="no passage fits the question")),
    ):
        user = Message(chat=chat.id, parent=parent, role="user", text=question, reading=reading)
        answer_message = Message(chat=chat.id, parent=user.id, role="assistant", text=text, model="starter")
        store.put_message(user)
        store.put_message(answer_message)
        parent = answer_message.id
    chat.leaf = parent
    store.put_chat(chat)
    store.close()


@pytest.mark.parametrize(
    ("pressed", "theme"),
    [((), "textual-dark"), (("ctrl+t",), "textual-dark"), (("ctrl+t",), "textual-light")],
    ids=["folded", "unfolded", "light"],
)
def test_what_was_read(app: ChatApp, front: Path, pressed: tuple[str, ...], theme: str, snap_compare: Any) -> None:
    fill_readings(front / "chats.db")
    assert snap_compare(app, terminal_size=(80, 26), run_before=keys(OPEN_QUICKSORT, *pressed, theme=theme))


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_asking_before_passages_are_sent(app: ChatApp, theme: str, snap_compare: Any) -> None:
    passages = (Passage("README.md", "Install", "Run `make all`."), Passage("docs/gpu.md", "", "x" * 900))

    async def run(pilot: Pilot[None]) -> None:
        await keys(theme=theme)(pilot)
        pilot.app.push_screen(
            SendScreen(SendQuestion("The frobnicator", "gpu.example:11500", ("/srv/notes", "/srv/plan.md"), passages))
        )
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=(80, 24), run_before=run)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_the_knowledge_of_a_chat(app: ChatApp, theme: str, snap_compare: Any) -> None:
    left_out = (LeftOut("link.md", "a symbolic link"), LeftOut("model.gguf", "it is not text"))
    listed = (
        Entry("/srv/notes", Refreshed(12, 140, 0, left_out)),
        Entry(GUIDE, Refreshed(20, 154, 0, ())),
        Entry("/srv/gone", error="/srv/gone does not exist; name a folder or a file that is there"),
    )

    async def run(pilot: Pilot[None]) -> None:
        await keys(theme=theme)(pilot)
        pilot.app.push_screen(KnowledgeScreen(listed))
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=(80, 24), run_before=run)


def test_search(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(100, 30), run_before=keys("ctrl+f w a t e r"))


def test_small(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(60, 20), run_before=keys(OPEN_QUICKSORT))


def test_small_list_of_chats(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(60, 20), run_before=keys("ctrl+b"))


def test_commands(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys("/ s down"))


def test_help(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(100, 50), run_before=keys("f1"))


def test_parameters(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys("/ p a r a m s enter", "9 9 9 enter"))


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small machine, and a catalogue that stays as it is."""
    names = ("qwen3:0.6b", "qwen3:4b", "qwen3:8b", "qwen3:14b", "qwen3:32b", "gemma3:4b")
    selected = tuple(entry for entry in entries() if entry.name in names)
    monkeypatch.setattr("edgelm.tui.dialogs.picker.entries", lambda: selected)
    monkeypatch.setattr("edgelm.tui.commands.models.available_memory_bytes", lambda: 8 * 10**9)


@pytest.mark.usefixtures("catalogue")
def test_models(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(100, 30), run_before=keys("ctrl+o"))


@pytest.mark.usefixtures("catalogue")
def test_models_small(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(60, 20), run_before=keys("ctrl+o"))


@pytest.mark.usefixtures("catalogue")
def test_models_of_another_machine(front: Path, snap_compare: Any) -> None:
    address = json.loads((front / "front.json").read_text())["address"]
    link = Link(endpoint=address, api_key=None, runtime=front, log=front / "log")
    app = ChatApp(front / "chats.db", link, ChatDefaults())

    async def run(pilot: Pilot[None]) -> None:
        await keys("ctrl+o")(pilot)
        for words in (pilot.app.screen.query_one(Label), pilot.app.screen_stack[0].query_one(StatusLine)):
            # The port changes with each run.
            if isinstance(words, Label):
                words.update(str(words.content).replace(address, "http://gpu.example:11500"))
            else:
                words.change(endpoint="http://gpu.example:11500")

    assert snap_compare(app, terminal_size=(80, 24), run_before=run)


@pytest.mark.usefixtures("catalogue")
def test_a_model_that_is_being_pulled(front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    link = Link(endpoint=None, api_key=None, runtime=front, log=front / "log")
    command = (sys.executable, "-m", "tests.tui.fake_pulling", str(front))
    app = ChatApp(front / "chats.db", link, ChatDefaults(), command)

    async def run(pilot: Pilot[None]) -> None:
        await keys(OPEN_QUICKSORT)(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, ChatScreen)
        screen.pulls.start("qwen3:4b", 0)
        while not any("90 %" in pull.progress for pull in screen.pulls.running):
            await pilot.pause(0.02)
        await pilot.pause(0.4)

    assert snap_compare(app, terminal_size=(110, 34), run_before=run)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "ansi-dark"])
def test_what_was_drafted(app: ChatApp, theme: str, snap_compare: Any) -> None:
    before = keys("s o r t enter", "f3", theme=theme)
    assert snap_compare(app, terminal_size=(80, 30), run_before=before)


def fill_context(path: Path) -> None:
    """Write a chat whose last answer ended because its context was full."""
    store = Store(path, busy_ms=FILL_MS)
    chat = Chat(title="A long talk", created=MARCH_2025, changed=MARCH_2025)
    store.put_chat(chat)
    parent = None
    for i, question in enumerate(("What is a heap?", "And a Fibonacci heap?", "Which is used more?", "Show me one.")):
        user = Message(chat=chat.id, parent=parent, role="user", text=question)
        answer_message = Message(
            chat=chat.id, parent=user.id, role="assistant", text="Word by word. " * 30, model="starter"
        )
        if i == 3:
            answer_message.note = "context"
            answer_message.stats = stats_to_json(replace(STATS, prompt_tokens=3000, context_used=4096))
        store.put_message(user)
        store.put_message(answer_message)
        parent = answer_message.id
    chat.leaf = parent
    store.put_chat(chat)
    store.close()


def test_a_full_context(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill_context(front / "chats.db")
    assert snap_compare(app, terminal_size=(100, 30), run_before=keys("ctrl+f down enter", "f5"))


def test_a_shortened_conversation(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill_context(front / "chats.db")
    before = keys("ctrl+f down enter", "f5", "enter", "shift+tab up up up")
    assert snap_compare(app, terminal_size=(60, 20), run_before=before)


def test_a_selected_message(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys(OPEN_QUICKSORT, "shift+tab"))


THEMES = ["textual-dark", "textual-light", "ansi-dark"]


def engine_events() -> list[tuple[str, dict[str, Any]]]:
    """Return the events of an answer that is half written: a prompt in two chunks, drafts, a map of the KV cache."""
    names = ("model", "engine", "device", "context", "capacity", "slots", "kv_bytes_per_token", "weights_bytes")
    engine = dict(zip(names, ("qwen3:4b", "llama", "cpu", 8192, 16384, 4, 147_456, 2_497_280_000), strict=True))
    regions = [
        {"kind": "running", "tokens": 1210, "bytes": 1210 * 147_456, "sequence": 3},
        {"kind": "idle", "tokens": 2100, "bytes": 2100 * 147_456},
        {"kind": "snapshot", "tokens": 900, "bytes": 900 * 147_456},
        {"kind": "shared_snapshot", "tokens": 400, "bytes": 400 * 147_456},
        {"kind": "file", "tokens": 5200, "bytes": 5200 * 147_456},
    ]
    others = [{"kind": "running", "tokens": 800, "bytes": 800 * 147_456}]
    events: list[tuple[str, dict[str, Any]]] = [("engine", engine)]
    events.append(("kv", {"usage": 0.12, "regions": regions, "others": others}))
    chunk = {"sequence": 3, "prompt": 1200, "cached": 176, "accepted": 0, "drafted": 0, "forced": 0, "new": 0}
    at, position = 100.0, 176

    def step(ms: float, **changes: Any) -> None:
        nonlocal at, position
        at += ms / 1000
        chunks = [{**chunk, "start": position, **changes}]
        number = len(events) - 1
        events.append(("step", {"step": number, "at": at, "ms": ms, "running": 2, "waiting": 1, "chunks": chunks}))
        position += changes["computed"] - changes.get("drafted", 0) + changes.get("accepted", 0)

    def token(text: str, logprob: float) -> dict[str, Any]:
        top = [{"text": text, "logprob": logprob}, {"text": " list", "logprob": -2.3}, {"text": " a", "logprob": -3.1}]
        return {"text": text, "logprob": logprob, "top": top}

    step(1834.2, computed=512)
    step(1871.9, computed=512, new=1, tokens=[token("Quick", -0.1)])
    for text, logprob in (("sort", -0.02), (" picks", -0.9), (" a", -0.1), (" pivot", -0.3), (" and", -1.9)):
        step(118.4, computed=1, new=1, tokens=[token(text, logprob)])
    words = [token(text, -0.2) for text in (" splits", " the", " list", " around", " it")]
    step(131.6, computed=6, drafted=5, accepted=4, new=5, tokens=words)
    step(133.0, computed=7, drafted=6, forced=2, accepted=3, new=4, tokens=words[:4])
    return events


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", [(110, 40), (60, 20)])
def test_the_inspector(theme: str, size: tuple[int, int], snap_compare: Any) -> None:
    async def run(pilot: Pilot[None]) -> None:
        pilot.app.theme = theme
        panel = pilot.app.query_one(Inspector)
        for name, document in engine_events():
            seen = read_event(name, json.dumps(document))
            assert seen is not None
            panel.feed(seen)
        await pilot.press("left")
        await settle(pilot)

    assert snap_compare(Pictured(), terminal_size=size, run_before=run)


class Pictured(App[None]):
    """The inspector alone, without a connection."""

    def compose(self) -> ComposeResult:
        yield Inspector(bandwidth=30e9)


@pytest.mark.parametrize("theme", THEMES)
def test_the_inspector_below_a_chat(app: ChatApp, front: Path, theme: str, snap_compare: Any) -> None:
    fill(front / "chats.db")

    async def run(pilot: Pilot[None]) -> None:
        await keys(OPEN_QUICKSORT, theme=theme)(pilot)
        await pilot.press("f6")
        await until_text(pilot, "▰")
        await settle(pilot)

    assert snap_compare(app, terminal_size=(110, 40), run_before=run)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", [(110, 34), (60, 20)])
def test_the_tokens_of_an_answer(
    app: ChatApp, front: Path, theme: str, size: tuple[int, int], snap_compare: Any
) -> None:
    fill(front / "chats.db")

    async def run(pilot: Pilot[None]) -> None:
        await keys(OPEN_QUICKSORT, theme=theme)(pilot)
        await pilot.press("f7")
        await until_text(pilot, "token 1 of")
        await pilot.press("right", "right", "right")
        await until_text(pilot, "token 4 of", "60.0%")
        await settle(pilot)

    assert snap_compare(app, terminal_size=size, run_before=run)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", [(110, 34), (60, 20)])
def test_two_versions(app: ChatApp, front: Path, theme: str, size: tuple[int, int], snap_compare: Any) -> None:
    fill(front / "chats.db")

    async def run(pilot: Pilot[None]) -> None:
        await keys(OPEN_QUICKSORT, theme=theme)(pilot)
        await pilot.press(*"/compare", "space", *"temperature=0.2", "enter")
        await until_text(pilot, "temperature=0.2 · ")
        await settle(pilot)

    assert snap_compare(app, terminal_size=size, run_before=run)


def text_of(pilot: Pilot[None]) -> str:
    return "\n".join(rows_of(pilot))


def rows_of(pilot: Pilot[None]) -> list[str]:
    """Draw the screen. A dialog keeps what it draws: without the screens behind it, the picture would lack them."""
    visible_screen_stack.set(pilot.app._background_screens)
    return [strip.text for strip in pilot.app.screen._compositor.render_strips()]


async def until_text(pilot: Pilot[None], *words: str) -> None:
    """Wait until the screen shows all of these."""
    async with asyncio.timeout(60):
        while not all(word in text_of(pilot) for word in words):
            await pilot.pause(0.02)
