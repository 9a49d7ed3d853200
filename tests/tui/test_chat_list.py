"""The list of chats by keys and mouse: pins, tags, the archive, and the trash from which chats come back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from edgelm.chats.history import Chat, Hit, Message
from edgelm.chats.store import Store
from edgelm.tui.chat_list import chat_rows, hit_rows
from edgelm.tui.dialogs.basic import PickScreen
from edgelm.tui.dialogs.statistics import StatsScreen
from edgelm.tui.dialogs.tags import TagScreen
from edgelm.tui.sidebar import ChatList
from edgelm.tui.tags import changed_tags, split_query, suggest_tags
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint
from tests.tui.test_mouse import click, opens

DAY_S = 86_400.0


def fill(folder: Path, *chats: Chat) -> None:
    """Save chats, each with one question."""
    store = Store(folder / "chats.db")
    for chat in chats:
        question = Message(chat=chat.id, parent=None, role="user", text=f"about {chat.title}")
        chat.leaf = question.id
        store.put_chat(chat)
        store.put_message(question)
    store.close()


def aged(title: str, days: float, **fields: object) -> Chat:
    chat = Chat(title=title, changed=time.time() - days * DAY_S)
    for name, value in fields.items():
        setattr(chat, name, value)
    return chat


def saved(folder: Path) -> dict[str, Chat]:
    store = Store(folder / "chats.db")
    chats = {chat.title: chat for chat in (*store.chats(), *store.deleted_chats())}
    store.close()
    return chats


def lines(chat: Driver) -> list[str]:
    """Return the texts of the list, without headings."""
    options = chat.screen.sidebar.query_one(ChatList).options
    return [str(option.prompt) for option in options if not option.disabled]


async def until_listed(chat: Driver, texts: list[str]) -> None:
    await chat.until(lambda: lines(chat) == texts, f"the list is {texts}")


def chosen(chat: Driver) -> str:
    """Return the line with the cursor."""
    options = chat.screen.sidebar.query_one(ChatList)
    assert options.highlighted is not None
    return str(options.get_option_at_index(options.highlighted).prompt)


# The lines


def test_chats_are_grouped_by_pin_age_and_archive() -> None:
    chats = [
        aged("old", 800), aged("now", 0), aged("in the archive", 0, archived=True, pinned=True),
        aged("a week ago", 5), aged("pinned", 30, pinned=True, tags=("work", "a b")),
    ]  # fmt: skip
    texts = [row.text.plain.strip() for row in chat_rows(chats, None, unfolded=False)]
    year = time.localtime(chats[0].changed).tm_year
    assert texts[:2] == ["Pinned", "★ pinned\n  #work #a b"]
    assert texts[2:4] == ["Today", "now"]
    assert texts[4:6] == ["Last 7 days", "a week ago"]
    assert texts[6].endswith(str(year))
    assert texts[7:] == ["old", "▸ Archived (1)"]
    unfolded = [row.text.plain.strip() for row in chat_rows(chats, None, unfolded=True)]
    assert unfolded[8:] == ["▾ Archived (1)", "in the archive"]


def test_a_list_of_ten_thousand_chats_has_few_lines() -> None:
    rows = chat_rows([aged("x", 0) for _ in range(10_000)], None, unfolded=False)
    assert len(rows) < 310
    assert rows[-1].text.plain == "… 9,700 more: search"


def test_escapes_in_titles_and_tags_are_not_drawn() -> None:
    chat = aged("\x1b[31mred", 0, tags=("\x1b]52;c;x\x07",), archived=True)
    rows = [*chat_rows([chat], None, unfolded=True), *hit_rows([Hit(chat, 1, "a \x02\x1bb\x03")], None)]
    assert all(character == "\n" or character.isprintable() for row in rows for character in row.text.plain)


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("home", ("work", "home")),
        ("#Home, home", ("work", "home")),
        ("-work", ()),
        ("-#work home", ("home",)),
        ("-missing", ("work",)),
        ("#", ("work",)),
        ("2026 straße", ("work", "2026", "straße")),
    ],
)
def test_tags_are_added_and_taken_away(text: str, tags: tuple[str, ...]) -> None:
    assert changed_tags(("work",), text) == tags


def test_tab_completes_known_tags() -> None:
    known = ["work", "home"]
    assert [suggestion.text for suggestion in suggest_tags("/tag ", known)] == ["/tag work", "/tag home"]
    assert [suggestion.text for suggestion in suggest_tags("/tag new -Wo", known)] == ["/tag new -work"]
    assert suggest_tags("/title wo", known) == []


def test_a_search_is_split_into_words_and_tags() -> None:
    assert split_query("  #Work two #h words") == ("two words", ("work", "h"))
    assert split_query("#wo").fits(Chat(tags=("home", "work")))
    assert not split_query("#wo #x").fits(Chat(tags=("home", "work")))


# Keys and commands


async def test_a_chat_is_pinned_archived_and_tagged_by_keys(open_chat: Open, tmp_path: Path) -> None:
    fill(tmp_path, aged("one", 0), aged("two", 1), aged("three", 2))
    async with open_chat(size=(120, 32)) as chat:
        await chat.ready()
        await chat.press("ctrl+f", "down", "down")
        assert chosen(chat) == "two"
        await chat.press("p")
        await chat.until(lambda: lines(chat) == ["★ two", "one", "three"], "pinned")
        assert chosen(chat) == "★ two", "the cursor stays on the chat"
        await chat.press("down", "a")
        await chat.until(lambda: lines(chat) == ["★ two", "three", "\n▸ Archived (1)"], "archived")
        assert chosen(chat) == "three", "the cursor goes to the next chat"
        await chat.press("t")
        await opens(chat, TagScreen)
        await chat.type("work")
        await chat.press("enter")
        await chat.until(lambda: "three\n#work" in lines(chat), "tagged")
        await chat.press("end", "enter")
        await chat.until(lambda: lines(chat)[-2:] == ["\n▾ Archived (1)", "one"], "the archive is unfolded")
        await chat.press("down", "a")
        await chat.until(lambda: "\n▾ Archived (1)" not in lines(chat), "taken out")
    chats = saved(tmp_path)
    assert chats["two"].pinned
    assert chats["three"].tags == ("work",)
    assert not chats["one"].archived


async def test_tags_filter_the_search(open_chat: Open, tmp_path: Path) -> None:
    fill(tmp_path, aged("apples", 0, tags=("work",)), aged("pears", 1, tags=("home",)), aged("apple pie", 2))
    async with open_chat(size=(120, 32)) as chat:
        await chat.ready()
        for search, found in (
            ("#wo", ["apples\n#work"]),
            ("#home apple", []),
            ("#", ["apples\n#work", "pears\n#home"]),
            ("apple", None),
        ):
            await chat.press("ctrl+f")
            chat.screen.sidebar.query_one(Input).value = search
            if found is None:
                await chat.until(lambda: len(lines(chat)) == 2, "both")
            else:
                await until_listed(chat, found)
        await chat.press("down", "delete")
        await chat.until(lambda: len(lines(chat)) == 1, "a deleted hit is gone")
        await chat.press("ctrl+z")
        await chat.until(lambda: len(lines(chat)) == 2, "and comes back")


async def test_commands_act_on_the_open_chat(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat(size=(120, 32)) as chat:
        await chat.ready()
        await chat.ask("/pin")
        await chat.hears("this chat is empty")
        await chat.ask("keep me")
        await chat.ask("/pin")
        await chat.until(lambda: lines(chat) == ["★ keep me"], "pinned")
        await chat.ask("/tag #Work home")
        await chat.ask("/tag -home")
        await chat.until(lambda: lines(chat) == ["★ keep me\n  #work"], "tagged")
        await chat.type("/tag w")
        await chat.press("tab")
        await chat.until(lambda: chat.prompt.text == "/tag work", "completed")
        await chat.ask("/archive")
        await chat.until(lambda: lines(chat) == ["▸ Archived (1)"], "archived")
        await chat.ask("And then?")  # the whole chat is written again
        assert len(chat.turns) == 4
    chat_saved = saved(tmp_path)["keep me"]
    assert (chat_saved.pinned, chat_saved.archived, chat_saved.tags) == (True, True, ("work",))


async def test_deleted_chats_come_back_in_order(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat(size=(120, 32)) as chat:
        for title in ("one", "two"):
            await chat.press("ctrl+n")
            await chat.ask(title)
        await chat.ask("/delete")
        await chat.hears("deleted: two", "Ctrl+Z")
        assert chat.turns == []
        await chat.press("ctrl+f", "down", "delete")
        await chat.sees("no chats yet")
        chat.screen.view.focus_prompt()
        await chat.type("abc")
        await chat.press("ctrl+z")
        await chat.until(lambda: chat.prompt.text == "", "what was typed is undone first")
        assert chat.turns == []
        await chat.press("ctrl+z")
        await chat.until(lambda: chat.turns == [("user", "one"), ("assistant", ANSWER)], "the last deleted one")
        await chat.ask("/undo")
        await chat.until(lambda: chat.turns[:1] == [("user", "two")], "the one before")
        assert lines(chat) == ["two", "one"]
        await chat.ask("/undo")
        await chat.hears("no chat was deleted in this run")
    assert all(kept.deleted is None for kept in saved(tmp_path).values())


async def test_deleting_a_chat_whose_answer_is_being_written(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.stall_after = 3
        await chat.ask_only("q")
        await chat.sees("Quicksort picks a")
        await chat.ask_only("/delete")
        await chat.until(lambda: chat.turns == [], "a new chat")
        chat.endpoint.stall_after = None
        await chat.ask("/undo")
        await chat.until(lambda: len(chat.turns) == 2, "with the part that was written")
        assert chat.session.tree.path()[-1].state == "stopped"


async def test_a_chat_comes_back_from_the_trash_once(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        cats = chat.session.chat.id
        await chat.ask("/delete")
        await chat.until(lambda: not chat.turns, "deleted")
        await chat.ask("/undo")
        await chat.until(lambda: chat.turns, "it is back")
        chat.screen._face.listed["trash"] = [str(cats)]
        await chat.ask("/trash 1")
        await chat.hears("about cats is not in the trash any more")


async def test_notices_leave_the_row_of_what_is_set_in_sight(open_chat: Open) -> None:
    async with open_chat((80, 24)) as chat:
        await chat.ready()
        await chat.ask("/params temperature=0.1")
        chat.prompt.put("/nosuchcommand")
        await chat.press("enter")
        await chat.hears("there is no command")
        await chat.sees("there is no command", "temperature 0.1")
        assert "temperature 0.1" in chat.text.split("\n")[1]


async def test_the_trash_is_listed_and_emptied_after_30_days(open_chat: Open, tmp_path: Path) -> None:
    now = time.time()
    fill(
        tmp_path,
        aged("young", 50, deleted=now - 29 * DAY_S),
        aged("old", 50, deleted=now - 31 * DAY_S),
        aged("here", 0),
    )
    async with open_chat() as chat:
        await chat.ready()
        await chat.until(lambda: "old" not in saved(tmp_path), "the old one is purged")
        await chat.ask("/trash")
        await opens(chat, PickScreen)
        await chat.sees("Bring back", "young")
        await chat.press("enter")
        await chat.until(lambda: chat.turns == [("user", "about young")], "it is open")
        await chat.ask("/trash")
        await chat.hears("no chat was deleted in the last 30 days")


async def test_the_trash_of_a_chat_that_stays_open_is_emptied(open_chat: Open, tmp_path: Path) -> None:
    fill(tmp_path, aged("here", 0))
    async with open_chat() as chat:
        await chat.ready()
        fill(tmp_path, aged("old", 50, deleted=time.time() - 31 * DAY_S))  # as if it had been here for a month
        await chat.ask("/trash")
        await chat.hears("no chat was deleted in the last 30 days")
        assert "old" not in saved(tmp_path)
        fill(tmp_path, aged("old", 50, deleted=time.time() - 31 * DAY_S))
        await chat.press("ctrl+f", "down", "delete")
        await chat.sees("no chats yet")
        await chat.until(lambda: "old" not in saved(tmp_path), "the old one is gone")


async def test_a_change_keeps_what_another_window_wrote(open_chat: Open, tmp_path: Path) -> None:
    one = aged("one", 0)
    fill(tmp_path, one)
    async with open_chat(size=(120, 32)) as chat:
        await chat.ready()
        await chat.sees("one")
        other = Store(tmp_path / "chats.db")
        one.system = "Be brief."
        other.put_chat(one)
        await chat.press("ctrl+f", "down", "p")
        await chat.until(lambda: saved(tmp_path)["one"].pinned, "pinned")
        assert saved(tmp_path)["one"].system == "Be brief."
        other.close()


# The mouse


async def test_the_right_button_asks_what_to_do(open_chat: Open, tmp_path: Path) -> None:
    fill(tmp_path, aged("one", 0, tags=("work",)), aged("two", 1))
    async with open_chat(size=(120, 32)) as chat:
        await chat.ready()
        await chat.sees("one", "two")
        for title, choice, result in (
            ("two", "Pin", ["★ two", "one\n#work"]),
            ("two", "Put into the archive", ["one\n#work", "\n▸ Archived (1)"]),
            ("one", "Show all with #work", ["one\n#work"]),
        ):
            row = next(i for i, line in enumerate(chat.text.split("\n")) if title in line[:28])
            await chat.pilot.click(offset=(4, row), button=3)
            await opens(chat, PickScreen)
            await click(chat, choice)
            await until_listed(chat, result)
        assert chat.turns == [], "no chat was opened"


async def test_a_click_on_the_notice_brings_the_chat_back(open_chat: Open) -> None:
    async with open_chat(size=(60, 20)) as chat:
        await chat.ask("a [bold]title[/] \\[x]")
        await chat.ask("/delete")
        await click(chat, "/undo")
        await chat.until(lambda: len(chat.turns) == 2, "it is back")


async def test_the_tag_dialog_by_mouse(open_chat: Open, tmp_path: Path) -> None:
    fill(tmp_path, aged("one", 0, tags=("work",)), aged("two", 1, tags=("home",)))
    async with open_chat(size=(60, 20)) as chat:
        await chat.ready()
        await chat.ask("three")
        await chat.ask_only("/tag")
        await opens(chat, TagScreen)
        await click(chat, "  home")
        await click(chat, "  work")
        await click(chat, "✓ home")
        await click(chat, "Enter saves")
        await chat.until(lambda: chat.session.chat.tags == ("work",), "the tags")
        await chat.ask_only("/tag")
        await opens(chat, TagScreen)
        await click(chat, "Esc cancels")
        await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")
        assert chat.session.chat.tags == ("work",)


# Statistics


async def test_statistics_are_shown(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat(size=(110, 34)) as chat:
        await chat.ready()
        await chat.ask("/stats")
        await chat.hears("no answers yet")
        await chat.ask("Explain quicksort")
        await chat.ask_only("/stats")
        await opens(chat, StatsScreen)
        await chat.sees("1 answer in 1 chat", "steps saved", "from the prefix cache", "model", "starter", "41.3")
        await click(chat, "m by model")
        await chat.sees("■ starter", "m by kind")
        await chat.pilot.resize_terminal(60, 20)
        await chat.sees("1 answer in 1 chat", "day", "written")
        assert "■" not in chat.text
        await click(chat, "Esc closes")
        await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")


async def test_a_new_title_does_not_move_the_list(open_chat: Open, tmp_path: Path) -> None:
    chats = [aged(f"chat {number}", number) for number in range(60)]
    fill(tmp_path, *chats)
    async with open_chat(size=(120, 24)) as chat:
        await chat.ready()
        await chat.sees("chat 0")
        await chat.press("ctrl+f", "down", *["down"] * 30)
        options = chat.screen.sidebar.query_one(OptionList)
        before = (options.highlighted, options.scroll_y)
        assert before[1] > 0
        chat.screen.workspace.change_chat(chats[29].id, title="renamed")
        chat.screen.view.show_title(chats[29].id)
        await chat.sees("renamed")
        assert (options.highlighted, options.scroll_y) == before
