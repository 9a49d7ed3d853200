"""Messages as the turns of a request: what is attached, and calls of tools."""

from __future__ import annotations

import itertools
from pathlib import Path

from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Chat, Message
from edgelm.chats.store import ChatsError, Store, deleted_elsewhere
from edgelm.chats.store_thread import StoreThread
from edgelm.chats.tool_calls import ToolCall
from edgelm.client.session import Session
from edgelm.client.turns import Call, Turn, as_messages


def turns_before_an_answer(tmp_path: Path, *messages: Message) -> tuple[Turn, ...]:
    store = StoreThread(tmp_path / "chats.db", lambda problem: None)
    try:
        for before, message in itertools.pairwise(messages):
            message.parent = before.id
        session = Session(store, Chat(), list(messages))
        _, turns = session.turns(session.begin_answer(messages[-1].id, "m"))
        return turns
    finally:
        store.close(5)


def test_calls_and_their_results_stand_between_the_texts_of_an_answer(tmp_path: Path) -> None:
    calls = (
        ToolCall(id="1", server="files", tool="list", arguments="{}", at=5, state="done", result="a.txt"),
        ToolCall(id="2", server="files", tool="stat", arguments='{"p": 1}', at=5, state="refused", result="refused"),
        ToolCall(id="3", server="files", tool="read", arguments="{}", at=5 + 6, state="done", result="hello"),
    )
    turns = turns_before_an_answer(
        tmp_path,
        Message(chat=1, parent=None, role="user", text="What is in it?"),
        Message(chat=1, parent=None, role="assistant", text="Look. Read: It says hello.", calls=calls, reasoning="hm"),
        Message(chat=1, parent=None, role="user", text="Thanks"),
    )
    assert turns == (
        Turn("user", "What is in it?"),
        Turn("assistant", "Look.", calls=(Call("1", "files__list", "{}"), Call("2", "files__stat", '{"p": 1}'))),
        Turn("tool", "a.txt", call_id="1"),
        Turn("tool", "refused", call_id="2"),
        Turn("assistant", " Read:", calls=(Call("3", "files__read", "{}"),)),
        Turn("tool", "hello", call_id="3"),
        Turn("assistant", " It says hello."),
        Turn("user", "Thanks"),
    )
    assert as_messages(turns, with_reasoning=True)[4:6] == [
        {
            "role": "assistant",
            "content": " Read:",
            "tool_calls": [{"id": "3", "type": "function", "function": {"name": "files__read", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "hello", "tool_call_id": "3"},
    ]


def test_attached_texts_and_pictures_are_sent_with_the_question(tmp_path: Path) -> None:
    note = Attachment(kind="text", name="a.py", text="a = 1\n")
    picture = Attachment(kind="image", name="a.png", data=b"\1", media_type="image/png")
    (turn,) = turns_before_an_answer(
        tmp_path, Message(chat=1, parent=None, role="user", text="Why?", attachments=(note, picture))
    )
    assert turn == Turn("user", "a.py:\n```\na = 1\n```\n\nWhy?", images=("data:image/png;base64,AQ==",))
    (message,) = as_messages([turn], with_reasoning=False)
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]


def test_a_chat_that_was_deleted_elsewhere_comes_back_with_a_question_only(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    thread = StoreThread(path, lambda problem: None)
    session = Session(thread, Chat(title="Here"), [])
    answer = session.begin_answer(session.add_question("One?", None).id, "m")
    assert thread.read(Store.chats).result(10)

    shell = Store(path)
    (chat,) = shell.chats()
    chat.deleted, chat.tags = 5.0, ("work",)
    shell.put_chat(chat)
    session.append(answer, "One.", "")
    session.finish(answer, "done")
    assert thread.read(Store.chats).result(10) == []
    session.add_question("Two?", answer.id)
    (saved,) = thread.read(Store.chats).result(10)
    assert saved.tags == ("work",), "what another program wrote is kept"
    shell.close()
    thread.close(5)


def test_a_chat_that_was_deleted_for_good_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    problems: list[ChatsError | None] = []
    thread = StoreThread(path, problems.append)
    session = Session(thread, Chat(title="Gone", system="secret"), [])
    answer = session.begin_answer(session.add_question("One?", None).id, "m")
    (chat,) = thread.read(Store.chats).result(10)
    shell = Store(path)
    shell.delete_chat(chat.id)
    for word in "an answer of a few words".split():
        session.append(answer, word, "")
    session.finish(answer, "done")
    session.set_system("another secret")
    assert thread.read(Store.chats).result(10) == []
    assert [str(problem) for problem in problems] == [str(deleted_elsewhere())], "it is said once"
    shell.close()
    thread.close(5)
