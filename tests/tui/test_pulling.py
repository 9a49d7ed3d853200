"""Pulling from the chat: any model of the catalogue or the hub, while the chat goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from edgelm.client.endpoint import ModelEntry
from edgelm.library.catalog import FIRST_CHAT, entries
from edgelm.library.progress import Listed, ListedFile, Progress, Pulled, Retrying, StandingIn
from edgelm.tui.dialogs import picker
from edgelm.tui.dialogs.picker import Installed, PickerApp, PickerScreen, needed_bytes
from edgelm.tui.model_names import find_pulled
from edgelm.tui.pulls import Pull
from edgelm.tui.status import pull_text
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import ANSWER

HUGE = 10**13


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "hub"
    path.mkdir()
    return path


@pytest.fixture
def pulling(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.tui.fake_pulling", str(folder)]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.tui.commands.models.available_memory_bytes", lambda: 4 * 10**9)


async def processes(folder: Path) -> bytes:
    """Return the ids of the processes that pull into a folder."""
    pgrep = await asyncio.create_subprocess_exec("pgrep", "-f", str(folder), stdout=subprocess.PIPE)
    return (await pgrep.communicate())[0]


async def pick(chat: Driver, name: str) -> None:
    await chat.press("ctrl+o")
    await chat.sees("Model of this chat")
    await chat.type(name)
    await chat.sees(name)
    await chat.press("enter")
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "the chat")


async def test_the_chat_works_during_a_pull(open_chat: Open, pulling: list[str], folder: Path) -> None:
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await pick(chat, "qwen3:0.6b")
        await chat.sees("↓ qwen3:0.6b · 90 % · 9.00 MB of 10.0 MB · 1.00 MB/s · 1 s left · /pull stop")
        await chat.ask("q1")
        assert chat.turns[-1] == ("assistant", ANSWER)
        assert "↓ qwen3:0.6b" in chat.text, "it is still coming"
        assert chat.endpoint.requests[-1]["model"] == "starter"
        chat.endpoint.models.append("qwen3:0.6b")
        chat.endpoint.paths["qwen3:0.6b"] = str(folder / "pulled.gguf")
        (folder / "go").touch()
        await chat.hears("qwen3:0.6b is here, and answers this chat")
        await chat.until(lambda: "↓" not in chat.text, "no line of the pull")
        await chat.ask("q2")
        assert chat.endpoint.requests[-1]["model"] == "qwen3:0.6b", "no restart was needed"
    assert (folder / "jobs").read_text() == "qwen3:0.6b\n"


async def test_stopping_keeps_partial_files(open_chat: Open, pulling: list[str], folder: Path) -> None:
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await pick(chat, "qwen3:0.6b")
        await chat.sees("90 %")
        await chat.press("ctrl+o")
        await chat.sees("Being pulled: Enter stops")
        await chat.type("0.6")
        await chat.until(lambda: "↓ qwen3:0.6b" in chat.text)
        await chat.press("enter")
        await chat.hears("the pull of qwen3:0.6b was stopped at 9.00 MB", "continues it")
        await chat.until(lambda: not chat.screen.pulls, "the end of the process")
        assert (folder / "ended").exists(), "it ended by itself and was not killed"
        await chat.ask("/pull stop")
        await chat.hears("nothing is being pulled")
        await chat.ask("/pull qwen3:0.6b")
        await chat.sees("90 %")
        (folder / "go").touch()
        await chat.hears("qwen3:0.6b is here, but the endpoint does not list it yet")
    assert (folder / "jobs").read_text() == "qwen3:0.6b\n" * 2


async def test_any_name_of_the_hub(open_chat: Open, pulling: list[str], folder: Path) -> None:
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await pick(chat, "ab/Some-GGUF:Q8_0")
        await chat.sees("↓ ab/Some-GGUF:Q8_0 · 90 %")
        await chat.ask("/pull ab/Some-GGUF:Q8_0")
        await chat.hears("is being pulled already")
        await chat.ask("/pull stop ab/Some-GGUF:Q8_0")
        await chat.hears("was stopped")
    assert (folder / "jobs").read_text() == "ab/Some-GGUF:Q8_0\n"


async def test_another_chat_is_only_notified(open_chat: Open, pulling: list[str], folder: Path) -> None:
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await chat.ask("/pull qwen3:0.6b")
        await chat.sees("90 %")
        await chat.press("ctrl+n")
        chat.endpoint.models.append("qwen3:0.6b")
        chat.endpoint.paths["qwen3:0.6b"] = str(folder / "pulled.gguf")
        (folder / "go").touch()
        await chat.hears("qwen3:0.6b is here: Ctrl+O chooses it")
        assert chat.screen.status.status.model == "starter"


@pytest.mark.parametrize(
    ("how", "words"),
    [("fail", "the hub refuses o/n; log in with"), ("die", "the pull of qwen3:0.6b broke off; pull it")],
)
async def test_a_pull_that_fails_is_one_line(open_chat: Open, pulling: list[str], how: str, words: str) -> None:
    async with open_chat(pulling=[*pulling, how]) as chat:
        await chat.ready()
        await chat.ask("/pull qwen3:0.6b")
        await chat.hears(words)
        assert not chat.screen.pulls
        await chat.ask("q1")
        assert chat.turns[-1] == ("assistant", ANSWER)


async def test_no_process_can_be_started(open_chat: Open) -> None:
    async with open_chat(pulling=["/nowhere/python"]) as chat:
        await chat.ready()
        await chat.ask("/pull qwen3:0.6b")
        await chat.hears("a process cannot be started: No such file")


async def test_a_misspelt_name_is_answered_at_once(open_chat: Open, pulling: list[str], folder: Path) -> None:
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await chat.ask("/model qwen3:0.6b")
        await chat.hears("qwen3:0.6b is not on this machine; /pull qwen3:0.6b gets it")
        await chat.ask("/pull qwem3:0.6b")
        await chat.hears("there is no model qwem3:0.6b; did you mean", "qwen3:0.6b")
    assert not (folder / "jobs").exists()


async def test_a_remote_endpoint_has_its_own_models(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("ctrl+o")
        await chat.sees("starter", "these are the models of http://127.0.0.1", "pull more there")
        assert "qwen3:0.6b" not in chat.text
        await chat.press("escape")
        await chat.ask("/pull qwen3:0.6b")
        await chat.hears("pull more there")
        assert not chat.screen.pulls


async def test_quitting_asks_first_and_ends_the_process(open_chat: Open, pulling: list[str], folder: Path) -> None:
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await chat.ask("/pull qwen3:0.6b")
        await chat.sees("90 %")
        await chat.press("ctrl+q")
        await chat.sees("Quitting stops the pull", "partial files are kept")
        await chat.press("n")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        assert chat.screen.pulls
        await chat.press("ctrl+q")
        await chat.sees("Quitting stops")
        await chat.press("y")
        await chat.until(lambda: chat.app._exit, "the end")
    assert not await processes(folder)


async def test_the_process_ends_with_the_chat(open_chat: Open, pulling: list[str], folder: Path) -> None:
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await chat.ask("/pull qwen3:0.6b")
        await chat.sees("90 %")
    for _ in range(2000):
        if not await processes(folder):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a process is left")


# The picker itself


async def choose(app: PickerApp, *keys: str) -> str | None:
    async with app.run_test(size=(80, 30)) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause()
    return app.return_value


async def test_the_picker_alone() -> None:
    assert await choose(PickerApp([], HUGE), "enter") == entries()[0].name
    assert await choose(PickerApp([], HUGE), *"qwen3", "colon", *"14b", "enter") == "qwen3:14b"
    assert await choose(PickerApp([], HUGE), *"code", "down", "enter") not in (None, entries()[0].name)
    assert (
        await choose(PickerApp([], HUGE), "a", "slash", "b", "colon", "Q", "8", "underscore", "0", "enter")
        == "a/b:Q8_0"
    )
    assert await choose(PickerApp([], HUGE), *"xyzzy", "enter") is None, "there is no such model"
    assert await choose(PickerApp([], HUGE), "escape") is None


async def test_the_picker_alone_offers_no_installed_model() -> None:
    first, second = entries()[:2]
    assert await choose(PickerApp([Installed(first.name), Installed("starter")], HUGE), "enter") == second.name
    assert await choose(PickerApp([Installed("starter")], HUGE), *"starter", "enter") is None


async def test_ctrl_c_ends_the_picker_alone_as_it_ends_any_command() -> None:
    app = PickerApp([], HUGE)
    assert await choose(app, "q", "ctrl+c") is None
    assert app.return_code == picker.INTERRUPTED


async def test_models_that_fit_are_marked() -> None:
    small, large = entries()[0], max(entries(), key=lambda entry: entry.nbytes)
    app = PickerApp([], int(needed_bytes(small) / picker.USABLE) + 2)
    async with app.run_test(size=(100, 40)) as pilot:
        screen = app.screen
        assert isinstance(screen, PickerScreen)
        assert str(screen._catalogue_line(small).prompt).startswith(f"✓ {small.name}")
        assert "needs about" in str(screen._catalogue_line(large).prompt)
        assert not str(screen._catalogue_line(large).prompt).startswith("✓")
        await pilot.press("escape")


def test_pick_model_lists_the_installed_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offered = []

    def run(app: PickerApp) -> str:
        offered.append([model.name for model in app._screen._installed])
        return "qwen3:4b"

    monkeypatch.setattr(PickerApp, "run", run)
    assert picker.pick_model(tmp_path) == "qwen3:4b"
    assert offered == [["starter"]]


# Lines and events


def test_the_line_of_a_pull_fits_any_width() -> None:
    pull = Pull("qwen3:4b", 1)
    assert pull_text(pull, 80).plain == "↓ qwen3:4b · asking the hub · /pull stop pauses it"
    pull.take(Listed("o/n", "c", (ListedFile("a", 3_000_000_000, 1_000_000_000),)))
    assert "33 % · 1.00 GB of 3.00 GB" in pull_text(pull, 80).plain, "what was here counts"
    pull.take(Progress(2_000_000_000, 3_000_000_000, 0, 1, rate=5e7, seconds_left=20.0))
    assert pull_text(pull, 200).plain.startswith("↓ qwen3:4b · 67 % · 2.00 GB of 3.00 GB · 50.0 MB/s · 20 s left")
    for width in range(20, 120):
        assert pull_text(pull, width).plain.startswith("↓ qwen3:4b · 67 %")
        assert len(pull_text(pull, width).plain) <= max(width, 17)
    pull.take(Retrying("a", "the connection broke", 4.0))
    assert "the connection broke; again in 4 s" in pull_text(pull, 200).plain
    assert pull.state == "running"


def test_a_pull_says_that_another_model_is_pulled_and_what_stopping_it_loses() -> None:
    pull = Pull("smollm2", 1)
    assert pull.again == "continues it"
    pull.take(StandingIn("o/n", FIRST_CHAT))
    assert f"the hub cannot be reached; pulling {FIRST_CHAT} in its place" in pull_text(pull, 200).plain
    assert pull.again == Pull(FIRST_CHAT, 1).again == "begins it anew", "pip keeps no part"


def test_a_pulled_model_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "link.gguf").symlink_to("blob")
    pull = Pull("x", 1)
    pull.take(Pulled(tmp_path / "link.gguf", 1, 1, 1.0))
    models = [ModelEntry("starter"), ModelEntry("mine", path=str(tmp_path / "blob"))]
    assert find_pulled(models, pull) == "mine"
    assert find_pulled(models[:1], pull) is None
