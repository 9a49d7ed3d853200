"""The tint of drafted words: on exactly those words in every Markdown element, and only when switched on."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.style import Style
from rich.text import Text
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from edgelm.tui.lines import CONSOLE
from edgelm.tui.palette import MIN_CONTRAST, Palette, contrast, make_palette
from edgelm.tui.transcript.document import Document
from edgelm.tui.transcript.drafted import Span, Spans
from tests.counts import Count
from tests.tui.conftest import Driver, Open

EXAMPLES = Count(test=100, soak=5_000)
THEMES = ("textual-dark", "textual-light", "ansi-dark", "gruvbox", "dracula", "solarized-light")


def palette_of(name: str, *, drafts: bool) -> Palette:
    theme = BUILTIN_THEMES[name]
    variables = theme.to_color_system().generate() if not theme.ansi else {"primary": "ansi_blue"}
    return make_palette(theme, variables, drafts=drafts)


ON, OFF = palette_of("textual-dark", drafts=True), palette_of("textual-dark", drafts=False)


def tinted(document: Document, palette: Palette = ON, width: int = 60) -> list[tuple[str, bool]]:
    """Return the characters of a document on the screen, without decoration, each with whether it is tinted."""
    assert palette.drafted is not None
    characters = []
    for row in document.rows:
        for line in row.lines(width, palette):
            characters += _characters(line.text, palette.drafted)[line.prefix :]
            characters.append(("\n", False))
    return characters


def _characters(text: Text, style: Style) -> list[tuple[str, bool]]:
    characters = []
    for part in text.render(CONSOLE):
        has = part.style is not None and part.style + style == part.style
        characters += [(char, has) for char in part.text]
    return characters


def words_of(characters: Sequence[tuple[str, bool]]) -> dict[str, set[bool]]:
    """Return the words `w17` on the screen, and whether their characters have the tint."""
    text = "".join(char for char, _ in characters)
    return {match[0]: {has for _, has in characters[slice(*match.span())]} for match in re.finditer(r"w\d+e", text)}


FORMS = (
    "{0} {1} {2}\n", "\n{0} {1}\n\n", "**{0}** *{1}* ~~{2}~~\n", "- {0}\n  - {1} `{2}`\n", "1. {0}\n2. {1}\n",
    "> {0} {1}\n> {2}\n", "\n```python\n{0} = {1}\n\treturn {2}\n```\n", "\n| {0} | {1} |\n|---|---|\n| {2} | x |\n\n",
    "\n# {0} {1}\n", "[{0}](http://w.de/w) {1}.\n", "{0} &amp; {1} \\* {2}\n", "    {0}\n", "日本 {0} é {1}\r\n",
    "a. {0} a (a) {1}\n", "![{0}](p) {1}\n", "{0}  \n{1}\n",
)  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.sampled_from(FORMS), max_size=12), st.randoms(use_true_random=False))
def test_drafted_words_are_tinted(forms: list[str], chance: random.Random) -> None:
    source, spans, drafted = "", [], set()
    for i, form in enumerate(forms):
        words = [f"w{3 * i + k}e" for k in range(3)]
        written = form.format(*words)
        for word in words:
            if word in written and chance.random() < 0.5:
                drafted.add(word)
                at = len(source) + written.index(word)
                spans.append((at, at + len(word)))
        source += written
    document = Document(source, drafted=spans)
    shown = words_of(tinted(document, width=200))
    for word, has in shown.items():
        if "![" not in forms[int(word[1:-1]) // 3]:  # the text of a picture has no place in the source
            assert has == {word in drafted}, f"{word} in {source!r}"
    plain = [line.text.plain for row in Document(source).rows for line in row.lines(200, OFF)]
    assert plain == [line.text.plain for row in document.rows for line in row.lines(200, ON)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.sampled_from(FORMS), max_size=8), st.randoms(use_true_random=False))
def test_a_streamed_text_has_the_tint_of_the_whole(forms: list[str], chance: random.Random) -> None:
    source = "".join(form.format(f"w{i}e", f"v{i}e", f"u{i}e") for i, form in enumerate(forms))
    streamed, at, spans = Document(growing=True), 0, Spans()
    while at < len(source):
        step = chance.randint(1, 9)
        piece = source[at : at + step]
        part = [(0, len(piece))] if chance.random() < 0.4 else [(1, 2)] if len(piece) > 2 else []
        spans.add(part, at)
        streamed.append(piece, part)
        at += step
        if chance.random() < 0.2:
            tinted(streamed)
    streamed.settle()
    assert tinted(streamed) == tinted(Document(source, drafted=spans))


def test_off_means_no_tint_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> list[Span]:
        raise AssertionError("the spans are looked at")

    document = Document("some **bold** words\n\n```\ncode\n```\n", drafted=[(0, 30)])
    monkeypatch.setattr(Spans, "within", never)
    assert all(row.lines(60, OFF) for row in document.rows)


@pytest.mark.parametrize("name", THEMES)
def test_tinted_text_can_be_read_and_seen(name: str) -> None:
    palette = palette_of(name, drafts=True)
    assert palette.drafted is not None
    if palette.drafted.bgcolor is None:  # 16 colours
        assert palette.drafted.underline
        return
    behind = Color.from_rich_color(palette.drafted.bgcolor)
    assert palette.text.color is not None
    assert contrast(Color.from_rich_color(palette.text.color), behind) >= MIN_CONTRAST
    page = Color.parse(BUILTIN_THEMES[name].to_color_system().generate()["background"])
    assert 1.05 <= contrast(behind, page) <= 2.2, "seen, but not loud"


async def test_a_key_shows_and_hides_the_tint(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers, chat.endpoint.drafted = ["one two three four"], "w"
        await chat.ask("q1")
        assert drafted_on_screen(chat) == ""
        await chat.press("f3")
        await chat.until(lambda: drafted_on_screen(chat) == " two", "the tint")
        await chat.ask("q2")
        await chat.until(lambda: drafted_on_screen(chat) == " two two", "also of the next answer")
        await chat.press("ctrl+n")
        await chat.sees("F1 shows every key")
        await chat.press("ctrl+f", "down", "enter")
        await chat.until(lambda: drafted_on_screen(chat) == " two two", "it stays while edgelm runs")
        await chat.press("f3")
        await chat.until(lambda: drafted_on_screen(chat) == "", "no tint")


async def test_the_choice_is_saved_and_the_spans_are_not(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers, chat.endpoint.drafted = ["one two three four"], "w"
        await chat.ask("q1")
        await chat.press("f3")
        await chat.sees("drafted words are tinted")
    async with open_chat() as chat:
        await chat.until(lambda: chat.screen.view.shows_drafts, "the choice")
        await chat.press("ctrl+f", "down", "enter")
        await chat.sees("one two three four")
        assert drafted_on_screen(chat) == ""


def drafted_on_screen(chat: Driver) -> str:
    """Return the text with the tint."""
    transcript = chat.transcript
    style = transcript.palette.drafted
    if style is None:
        return ""
    region = transcript.scrollable_content_region
    strips = [transcript.render_line(y) for y in range(region.height)]
    return "".join(
        segment.text
        for strip in strips
        for segment in strip
        if segment.style and segment.style.bgcolor == style.bgcolor
    )
