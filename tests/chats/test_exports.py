"""Exports: all that is said is there, and a page of HTML holds nothing that could run or load."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from edgelm.base.errors import RequestError
from edgelm.base.passages import Passage
from edgelm.chats.attachments import Attachment
from edgelm.chats.export_html import to_html
from edgelm.chats.export_md import to_markdown
from edgelm.chats.exports import split_export
from edgelm.chats.handles import find_chat, handle, short_handles
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.reading import Reading
from edgelm.chats.tool_calls import ToolCall

EVIL = '<script>alert(1)</script><img src="http://evil.example/x" onerror="alert(2)">'
PNG = Attachment(kind="image", name='a".png', data=b"\x89PNG", media_type="image/png")
NOTES = Attachment(kind="text", name="notes.txt", text="line <one>\nline two\n")


@pytest.fixture
def chat() -> tuple[Chat, Tree]:
    chat = Chat(title=f"A {EVIL}\nchat", system=f"Be {EVIL}.")
    old = Message(chat=chat.id, parent=None, role="user", text="an older version")
    question = Message(chat=chat.id, parent=None, role="user", text=f"Look {EVIL}", attachments=(NOTES, PNG))
    question.reading = Reading(("/a",), (Passage("a.md", "H", f"passage {EVIL}"),))
    text = f"Before\n\nAfter **bold** {EVIL}\n\n```python\ndef f(): return '<b>'\n```\n\n"
    text += "![x](http://evil.example/y.png) [link](javascript:alert(3))\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    answer = Message(chat=chat.id, parent=question.id, role="assistant", text=text, model=f"m{EVIL}", state="stopped")
    answer.reasoning = f"thinking {EVIL}"
    answer.calls = (
        ToolCall(id="1", server="files", tool="read", arguments='{"path": "<x>"}', at=6, state="done", result=EVIL),
    )
    failed = Message(chat=chat.id, parent=question.id, role="assistant", state="failed", note=f"no {EVIL}")
    return chat, Tree([old, question, failed, answer], answer.id)


class Page(HTMLParser):
    """The tags of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_one_page_with_everything_and_nothing_that_runs(chat: tuple[Chat, Tree]) -> None:
    text = to_html(*chat)
    page = Page(text)
    assert not page.open, "every element is closed"
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "form", "base"}
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert [values["src"] for tag, values in page.tags if tag == "img"] == ["data:image/png;base64,iVBORw=="]
    assert {values["href"] for tag, values in page.tags if tag == "a"} == {"http://evil.example/y.png"}
    policy = next(values["content"] for tag, values in page.tags if "http-equiv" in values)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert text.count("<details>") == 5, "system prompt, file, passages, reasoning and call are folded"
    said = "line <one>", "thinking", "passage", "files › read, done", '{"path": "<x>"}', "After", f"m{EVIL}"
    for words in (*said, "stopped before its end"):
        assert words in page.text
    assert "an older version" not in page.text, "the branch on screen alone"
    assert {"table", "strong", "span"} <= names, "Markdown is drawn, and code has colours"
    assert "prefers-color-scheme: dark" in text


def test_markdown_has_attachments_and_calls(chat: tuple[Chat, Tree]) -> None:
    text = to_markdown(*chat)
    assert text.startswith("# A <script>")
    call = 'Before\n\n**Tool** `files/read`, done\n\n```\n{"path": "<x>"}\n'
    attached = "notes.txt:\n```\n", '*a".png (a picture)*'
    for words in (*attached, call, "After", "*stopped before its end*"):
        assert words in text
    chat[1].turn(chat[1].path()[-1].id, -1)
    assert "*failed: no <script>" in to_markdown(*chat)


@pytest.mark.parametrize(
    ("argument", "form", "name"),
    [
        ("", "md", ""), ("html", "html", ""), ("json my file.txt", "json", "my file.txt"), ("a.html", "html", "a.html"),
        ("md.json", "json", "md.json"), ("My chat.JSON", "json", "My chat.JSON"),
        ("a.htmlx", "md", "a.htmlx"), ("to/notes", "md", "to/notes"),
        ("json notes", "json", "notes"),
    ],
)  # fmt: skip
def test_the_format_of_an_export(argument: str, form: str, name: str) -> None:
    assert split_export(argument) == (form, name)


def test_a_word_that_is_no_format_of_an_export_is_no_file() -> None:
    with pytest.raises(RequestError, match="'nope' is no format; give md, json, html"):
        split_export("nope")


def test_handles_name_one_chat_with_few_letters() -> None:
    chats = [Chat(title=f"chat {i}") for i in range(2_000)]
    assert len({handle(chat.id) for chat in chats}) == 2_000
    short = short_handles(chats)
    assert max(map(len, short.values())) <= 8
    assert all(find_chat(short[chat.id], chats) is chat for chat in chats[::100])
    assert find_chat("chat 7", chats) is chats[7], "the whole title comes before a part of others"
    assert find_chat("last", [Chat(archived=True), *chats]) is chats[0]
    for name, words in (("zzyy", "there is no chat"), ("chat 1", ""), ("chat", "is 2000 chats: "), ("", "no chat")):
        if words:
            with pytest.raises(RequestError, match=words):
                find_chat(name, chats)
    with pytest.raises(RequestError, match="no chats yet"):
        find_chat("last", [])
