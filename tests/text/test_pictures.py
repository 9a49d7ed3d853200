"""Marks in place of pictures: no text of a client can stand for one, and none stands between a picture and a text."""

from __future__ import annotations

import pytest

from edgelm.base.errors import RequestError
from edgelm.text.chat import render_chat
from edgelm.text.history import text_of
from edgelm.text.message_forms import content_of, picture_part
from edgelm.text.pictures import name_of, names_in, with_marks
from edgelm.text.template import ChatTemplate

ONE, OTHER = picture_part("data:,one"), picture_part("data:,other")
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    special_strings=frozenset({"<|im_start|>", "<|im_end|>"}),
)


def user(*parts: str | dict[str, object]) -> dict[str, object]:
    return {"role": "user", "content": content_of(parts)}


def test_a_picture_joins_the_texts_beside_it() -> None:
    (message,), marks = with_marks([user("a", "b", ONE, "c", OTHER, ONE)])
    one, other = marks
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": f"b{one}c{other}{one}"}]
    assert list(marks.values()) == [name_of("data:,one"), name_of("data:,other")]


def test_messages_without_pictures_are_left_as_they_are() -> None:
    messages = [user("a", "b"), {"role": "assistant", "content": None}, {"role": "user", "content": "c"}]
    assert with_marks(messages) == (messages, {})


def test_no_text_of_a_client_stands_for_a_picture() -> None:
    _, marks = with_marks([user(ONE)])
    (mark,) = marks
    messages, others = with_marks([user(ONE, f"{mark} and {name_of('data:,one')}")], [{"description": mark}])
    assert mark not in others
    rendered = render_chat(TEMPLATE, messages, pictures=others)
    assert names_in(rendered.text, rendered.plain) == [name_of("data:,one")]


def test_a_template_that_drops_a_picture_is_an_error() -> None:
    messages, marks = with_marks([{"role": "system", "content": [ONE]}, user("hello")])
    blind = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="does not show a picture"):
        render_chat(blind, [{"role": "tool", "content": messages[0]["content"]}, messages[1]], pictures=marks)


def test_the_text_of_a_message_is_that_beside_its_pictures() -> None:
    assert text_of(user("a", ONE, "b")["content"]) == "ab"
    with pytest.raises(RequestError, match="input_audio"):
        text_of([{"type": "input_audio"}])
