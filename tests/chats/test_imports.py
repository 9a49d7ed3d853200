"""Imports of made-up exports: titles, times, models, branches and pictures are kept, and nothing comes twice."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.passages import Passage
from edgelm.chats.attachments import Attachment
from edgelm.chats.export_json import to_json
from edgelm.chats.formats import Source
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.imports.draft import BadChatError, DraftChat
from edgelm.chats.imports.files import read_file
from edgelm.chats.imports.json_stream import TruncatedError, json_values
from edgelm.chats.imports.save import NO_QUESTION, Outcome, save_draft
from edgelm.chats.reading import Reading
from edgelm.chats.store import Store
from edgelm.chats.tool_calls import ToolCall
from tests.chats.exports_of_others import PNG, chatgpt, old_openwebui, openwebui, write_ollama
from tests.counts import Count


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store(None)
    yield opened
    opened.close()


def imported(store: Store, path: Path, source: Source = "auto") -> list[Outcome | str]:
    """Import a file; return what became of each conversation."""
    outcomes: list[Outcome | str] = []
    for item in read_file(path, source):
        try:
            outcomes.append(str(item) if isinstance(item, BadChatError) else save_draft(store, item))
        except BadChatError as error:
            outcomes.append(str(error))
    return outcomes


def written(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "export.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def tree_of(store: Store, chat: Chat) -> Tree:
    return Tree(store.messages(chat.id), chat.leaf)


def zipped(tmp_path: Path, files: dict[str, bytes]) -> Path:
    path = tmp_path / "export.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_chatgpt(store: Store, tmp_path: Path) -> None:
    content = json.dumps([chatgpt()]).encode()
    path = zipped(tmp_path, {"x/conversations.json": content, "x/file_01ab-photo.png": PNG, "user.json": b"{}"})
    assert imported(store, path) == ["new"]
    (chat,) = store.chats()
    assert (chat.title, chat.archived, chat.created, chat.changed) == ("Pelicans", True, 1.7e9, 1.7e9 + 100)
    assert chat.summarized, "its title is not replaced"
    tree = tree_of(store, chat)
    question, answer, thanks, last = tree.path()
    assert (question.text, question.attachments[0].name) == ("How big is it?", "file_01ab-photo.png")
    assert question.created == 1.7e9 + 0.5
    assert answer.text == "```python\n1 + 1\n```\n\n```\n2\n```\n\nTwo metres."
    assert answer.reasoning == "Look\n\nIt is a bird."
    assert answer.model == "gpt-5"
    assert (thanks.text, last.text, last.state) == ("Thanks", "You are", "stopped")
    assert "secret" not in str(tree.messages)
    assert tree.turn(question.id, -1), "the question before it was edited"
    assert [message.text for message in tree.path()] == ["How old is the pelican?", "Very old."]


def test_chatgpt_in_several_files_and_without_pictures(store: Store, tmp_path: Path) -> None:
    second = chatgpt() | {"id": "6a-2", "conversation_id": None, "title": None, "current_node": None}
    files = {f"conversations-00{i}.json": json.dumps([item]).encode() for i, item in enumerate([chatgpt(), second])}
    assert imported(store, zipped(tmp_path, files)) == ["new", "new"]
    titles = {chat.title for chat in store.chats()}
    assert titles == {"Pelicans", "How old is the pelican?"}
    texts = [message.text for chat in store.chats() for message in store.messages(chat.id)]
    assert "[an image that is not in the export]\n\nHow big is it?" in texts


def test_openwebui(store: Store, tmp_path: Path) -> None:
    assert imported(store, written(tmp_path, [openwebui(), old_openwebui()])) == ["new", "new"]
    chat, old = store.chats()
    assert (chat.title, chat.pinned, chat.tags, chat.system) == ("Weather", True, ("sky",), "Be brief.")
    assert (chat.created, chat.changed) == (1.71e9, 1.71e9 + 500)
    tree = tree_of(store, chat)
    question, answer, _, failed = tree.path()
    assert [(item.kind, item.name, item.text) for item in question.attachments] == [
        ("image", "image.png", ""), ("text", "notes.txt", "wet"),
    ]  # fmt: skip
    assert answer.text == '```\nweather {"city": 1}\n```\n\n```\n"rain"\n```\n\n\nYes.'
    assert (answer.reasoning, answer.model, answer.state) == ("Let me\nsee & think", "qwen3:4b", "stopped")
    assert (failed.state, failed.note) == ("failed", "the model is gone")
    assert tree.turn(answer.id, -1)
    assert tree.path()[-1].model == "llama3:8b"
    assert (old.title, old.created) == ("Old one", 1.7e9)
    assert [message.text for message in tree_of(store, old).path()] == ["Old?", "Yes."]


def test_answers_of_newer_versions_of_openwebui_are_items(store: Store, tmp_path: Path) -> None:
    export = openwebui()
    export["chat"]["history"]["messages"]["b2"] |= {
        "content": "",
        "output": [
            {"type": "reasoning", "content": [{"type": "output_text", "text": "Let me see"}], "summary": None},
            None,
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        ],
    }
    assert imported(store, written(tmp_path, [export])) == ["new"]
    answer = tree_of(store, store.chats()[0]).path()[1]
    assert (answer.text, answer.reasoning) == ('```\nweather {"city": 1}\n```\n\n```\nrain\n```\n\nYes.', "Let me see")


def test_ollama_desktop(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db.sqlite"
    write_ollama(path)
    before = path.read_bytes()
    assert imported(store, path) == ["new", "new", "it has no messages"]
    monkeypatch.setattr("edgelm.chats.imports.save.time.time", lambda: 2e9)  # one chat has no times
    assert imported(store, path) == ["same", "same", "it has no messages"]
    assert path.read_bytes() == before
    chat = next(chat for chat in store.chats() if chat.title == "Sums")
    question, answer = tree_of(store, chat).path()
    assert [(item.kind, item.name) for item in question.attachments] == [("text", "a.txt"), ("image", "a.png")]
    assert question.created == 1_754_042_401.5
    assert answer.text == '```\nread {"file": 1}\n```\n\n```\nforty two\n```\n\nIt is 42.'
    assert (answer.reasoning, answer.model) == ("I look.", "gpt-oss:20b")
    assert {chat.title for chat in store.chats()} == {"Sums", "Hello there"}


@pytest.mark.parametrize("form", ["list", "object", "lines", "lists"])
def test_messages_of_ollamas_api(store: Store, tmp_path: Path, form: str) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello.", "thinking": "Greet."},
    ]
    document: Any = {"model": "gemma3", "messages": messages, "modelfile": "FROM x"}
    if form == "list":
        document = messages
    elif form == "lists":
        document = [messages]
    elif form == "lines":
        document = "\n".join(map(json.dumps, messages))
    path = written(tmp_path, document)
    assert imported(store, path, "ollama") == ["new"]
    assert imported(store, path) == ["same"]
    (chat,) = store.chats()
    assert (chat.title, chat.system) == ("Hi", "Be kind.")
    _, answer = tree_of(store, chat).path()
    assert (answer.text, answer.reasoning) == ("Hello.", "Greet.")


def test_a_later_export_adds_what_is_new(store: Store, tmp_path: Path) -> None:
    later = chatgpt()
    earlier = json.loads(json.dumps(later))
    del earlier["mapping"]["q3"], earlier["mapping"]["a3"]
    earlier["current_node"] = "a2"
    assert imported(store, written(tmp_path, [earlier])) == ["new"]
    (chat,) = store.chats()
    num_before = len(store.messages(chat.id))
    assert imported(store, written(tmp_path, [later, later])) == ["grown", "same"]
    (chat,) = store.chats()
    assert len(store.messages(chat.id)) == num_before + 2
    assert tree_of(store, chat).path()[-1].text == "You are"
    chat.deleted = 5.0
    store.put_chat(chat)
    assert imported(store, written(tmp_path, [later])) == ["deleted"]
    assert store.chats() == []


def test_a_chat_that_the_user_went_on_with_is_left_where_it_is(store: Store, tmp_path: Path) -> None:
    path = written(tmp_path, [openwebui()])
    imported(store, path)
    (chat,) = store.chats()
    own = Message(chat=chat.id, parent=chat.leaf, role="user", text="And now?")
    chat.leaf, chat.title = own.id, "My rain"
    store.put_message(own)
    store.put_chat(chat)
    grown = openwebui()
    grown["chat"]["history"]["messages"]["b5"] = {"parentId": "b4", "role": "user", "content": "Hello?"}
    grown["chat"]["history"]["currentId"] = "b5"
    assert imported(store, written(tmp_path, [grown])) == ["grown"]
    (after,) = store.chats()
    assert (after.leaf, after.title) == (own.id, "My rain")
    assert "Hello?" in [message.text for message in store.messages(chat.id)]


def test_one_bad_conversation_is_not_the_end(store: Store, tmp_path: Path) -> None:
    good, other = json.dumps(chatgpt()), json.dumps(openwebui())
    path = written(tmp_path, f'[{good}, {{"mapping": tru}}, {{"title": "x"}}, {{"mapping": {{}}, "id": "e"}}, {other}')
    assert imported(store, path) == [
        "new", "it is not valid JSON", "it is no conversation of a program that edgelm knows", "it has no messages",
        "new", "export.json ends in the middle of it",
    ]  # fmt: skip
    assert len(store.chats()) == 2


NO_EXPORTS = (
    b"",
    b"hello",
    b"[1, 2]",
    b"[]",
    b"{}",
    b"\xff\xfe\0",
    b'"text"',
    b"PK\x03\x04junk",
    b"SQLite format 3\0 no",
)


@pytest.mark.parametrize("content", NO_EXPORTS)
def test_what_is_no_export_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(EdgeLMError) as caught:
        list(read_file(path, "auto"))
    assert "\n" not in str(caught.value)


def test_an_answer_without_a_question_gets_one(store: Store, tmp_path: Path) -> None:
    path = written(tmp_path, [{"role": "assistant", "content": "Welcome!"}, {"role": "user", "content": "Hi"}])
    assert imported(store, path) == ["new"]
    (chat,) = store.chats()
    assert [message.text for message in tree_of(store, chat).path()] == [NO_QUESTION, "Welcome!", "Hi"]


def test_circles_and_missing_parents_lose_nothing_else(store: Store, tmp_path: Path) -> None:
    broken = chatgpt()
    broken["mapping"]["q1"]["parent"] = "a1"
    broken["mapping"]["q2"]["parent"] = "nowhere"
    assert imported(store, written(tmp_path, [broken])) == ["new"]
    (chat,) = store.chats()
    assert [message.text for message in tree_of(store, chat).path()][-2:] == ["Thanks", "You are"]


def test_values_are_read_one_at_a_time() -> None:
    document = [{"text": 'a "quoted" \\ ] }' * 50, "list": [[1], {"x": "}"}]}, {"b": 1}]
    text = "\ufeff " + json.dumps(document)
    for size in (1, 3, 1000):
        values = json_values(_reader(text, size))
        assert [json.loads(value) for value in values] == document
    with pytest.raises(TruncatedError):
        list(json_values(_reader('[{"a": "')))
    with pytest.raises(RequestError):
        list(json_values(_reader("[nothing]")))


def _reader(text: str, size: int | None = None) -> Any:
    """Return a file's `read` that gives so many characters at a time."""
    file = io.StringIO(text)
    return lambda _: file.read(size)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
LINES = TEXTS.filter(lambda text: text.isprintable() and text.split(" ") == text.split() and bool(text))
TIMES = st.integers(1, 4_000_000_000).map(float)


@st.composite
def chats(draw: st.DrawFn) -> tuple[Chat, list[Message]]:
    """Return any chat of edgelm: a tree of messages with everything that they may have."""
    chat = Chat(title=draw(TEXTS.filter(lambda text: text.split() == [text])), system=draw(TEXTS), created=draw(TIMES))
    chat.tags = tuple(dict.fromkeys(draw(st.lists(LINES, max_size=2))))
    chat.pinned, chat.archived, chat.renamed = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    chat.sampling = draw(
        st.fixed_dictionaries({}, optional={"temperature": st.floats(0, 2), "top_k": st.integers(0, 9)})
    )
    chat.changed = draw(TIMES)
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 6))):
        above = draw(st.sampled_from([None, *messages]))
        role: Any = "assistant" if above is not None and above.role == "user" and draw(st.booleans()) else "user"
        message = Message(chat=chat.id, parent=above and above.id, role=role, text=draw(TEXTS), created=draw(TIMES))
        message.state = draw(st.sampled_from(["done", "stopped", "failed"]))
        message.reasoning, message.model = draw(TEXTS), draw(st.sampled_from(["", "qwen3:4b", "org/name"]))
        message.note = " ".join(draw(TEXTS).split())
        if role == "user" and draw(st.booleans()):
            data = draw(st.binary(min_size=1, max_size=9))
            message.attachments = (Attachment(kind="image", name=draw(TEXTS), data=data, media_type="image/png"),)
            message.reading = Reading((draw(TEXTS.filter(bool)),), (Passage("a.md", draw(TEXTS), "text"),))
        elif role == "assistant" and draw(st.booleans()):
            message.calls = (ToolCall(id="1", server="s", tool="t", arguments="{}", at=draw(st.integers(0, 9))),)
            message.stats = '{"prompt_tokens": 3, "engine": "llama"}'
            message.sent_from = message.parent
        messages.append(message)
    chat.leaf = draw(st.sampled_from(messages)).id
    return chat, messages


@settings(max_examples=Count(test=40, soak=5_000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=chats())
def test_what_edgelm_exports_comes_back_the_same(made: tuple[Chat, list[Message]]) -> None:
    chat, messages = made
    import tempfile

    store = Store(None)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), to_json(chat, Tree(messages, chat.leaf)))
        assert imported(store, path) == ["new"]
        assert imported(store, path) == ["same"]
    assert store.chats() == [chat]
    assert store.messages(chat.id) == messages
    store.close()


ODD = st.sampled_from([None, True, -1, 1e308, "", "x", [], {}, [None], {"parts": None}, 10**400, "\ud800", "a1", "u1"])
WHERE = st.lists(st.integers(0, 30), max_size=6)


def mutate(value: Any, way: list[int], odd: Any) -> Any:
    """Return a JSON value with another one somewhere inside."""
    if not way or not isinstance(value, dict | list) or not value:
        return odd
    if isinstance(value, dict):
        name = list(value)[way[0] % len(value)]
        return value | {name: mutate(value[name], way[1:], odd)}
    place = way[0] % len(value)
    return [*value[:place], mutate(value[place], way[1:], odd), *value[place + 1 :]]


@settings(max_examples=Count(test=150, soak=20_000), deadline=None)
@given(st.sampled_from([chatgpt, openwebui, old_openwebui]), st.lists(st.tuples(WHERE, ODD), min_size=1, max_size=4))
def test_whatever_stands_in_an_export_is_imported_or_skipped(
    program: Any, changes: list[tuple[list[int], Any]]
) -> None:
    from edgelm.chats.imports import files

    document = program()
    for way, odd in changes:
        document = mutate(document, way, odd)
    parse = files._parser(document, "auto", lambda _: None)
    if parse is None:
        return
    item = files._read(parse, document)
    if isinstance(item, DraftChat):
        store = Store(None)
        try:
            save_draft(store, item)
        except BadChatError:
            pass
        else:
            (chat,) = store.chats()
            assert tree_of(store, chat).path(), "it can be shown"
        store.close()
