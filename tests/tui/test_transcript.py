"""Markdown as lines, and the positions of rows: streamed text looks like text that came at once."""

from __future__ import annotations

import random
from html import escape
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.theme import BUILTIN_THEMES

from edgelm.chats.export_html import to_html
from edgelm.chats.formulas import keep_formulas
from edgelm.chats.history import Chat, Message, Tree
from edgelm.client.answer_stream import AnswerStats
from edgelm.tui.lines import FoldedRow, FootRow, clean, cut_name, text_width, wrap_cells, wrap_words
from edgelm.tui.palette import Palette, contrast, make_palette
from edgelm.tui.prompt.box import History
from edgelm.tui.status import Status, status_text
from edgelm.tui.transcript.document import Document
from edgelm.tui.transcript.markdown import code_blocks
from edgelm.tui.transcript.views import Flow, MessageView
from edgelm.tui.transcript.widget import Layout, _moved
from tests.counts import Count
from tests.tui.fake_endpoint import ANSWER

EXAMPLES = Count(test=100, soak=5_000)


def palette_of(name: str) -> Palette:
    theme = BUILTIN_THEMES[name]
    return make_palette(theme, theme.to_color_system().generate() if not theme.ansi else {"primary": "ansi_blue"})


PALETTE = palette_of("textual-dark")

PIECES = st.sampled_from(
    [
        "word ", "**bold** ", "*it* ", "`code` ", "\n", "\n\n", "# Head\n", "- item\n", "  - inner\n", "1. one\n",
        "> quote\n", "```python\n", "```\n", "def f(x):\n    return 1\n", "| a | b |\n|---|:-:|\n", "| 1 | 2 |\n",
        "---\n", "日本語 ", "é ", "[link](http://x) ", "![i](p) ", "~~gone~~ ", "<b>html</b>", "\t",
        "    indented\n", "\\", "* ", "_", "[", "|", "\\[", "\\]", "$$", "$", "{", "\\(", "\r\n", "\r", "x" * 90,
    ]
)  # fmt: skip
SOURCES = st.lists(PIECES, max_size=40).map("".join)


def show(document: Document, width: int) -> list[list[str]]:
    return [[line.text.plain for line in row.lines(width, PALETTE)] for row in document.rows]


@settings(max_examples=EXAMPLES)
@given(SOURCES, st.integers(1, 120), st.randoms(use_true_random=False))
def test_streaming_ends_as_the_whole_does(source: str, width: int, chance: random.Random) -> None:
    streamed = Document(growing=True)
    at = 0
    while at < len(source):
        step = chance.randint(1, 12)
        streamed.append(source[at : at + step])
        at += step
        if chance.random() < 0.3:
            show(streamed, width)
    streamed.settle()
    assert show(streamed, width) == show(Document(source), width)


@pytest.mark.parametrize(
    "source",
    [
        r"The angle \( \alpha_1 \), the set \( \{2, 3\} \), and \(a*b*c\).",
        "\\[\n\\{ x_1 \\}\n- \\frac{1}{2} *b*\n= 3\n\\]",
        r"\[ E = mc^2 \\ \] holds",
        "$$\n\\sum_{i} \\_ \\,\n$$",
        r"$\{a_1, a_2\}$ and $x\_1$, from $5 to $6",
        r"x \in \{2,3\}, 5 \%",
    ],
)
def test_formulas_keep_their_source_in_exports(source: str) -> None:
    chat = Chat()
    answer = Message(chat=chat.id, parent=None, role="assistant", text=source)
    assert escape(source, quote=False) in to_html(chat, Tree([answer]))


@pytest.mark.parametrize(("opener", "closer"), [("\\(", "\\)"), ("\\[", "\\]")])
def test_a_formula_has_no_opener_of_its_own_inside(opener: str, closer: str) -> None:
    """Each opener is searched as far as the next one, so that thousands without an end take linear time."""
    parser = keep_formulas(MarkdownIt().disable("text_join"))
    (inline,) = parser.parseInline(f"{opener}a {opener}b \\\\[2pt] c{closer} {opener}")
    formulas = [token.content for token in inline.children or [] if token.info == "formula"]
    assert formulas == [opener, f"{opener}b \\\\[2pt] c{closer}", opener]


@pytest.mark.parametrize("source", ["Export $FOO and **bold** (`$BAR`)", "Set $A to `x` or `$B`", "$A **x** ($B"])
def test_shell_variables_are_no_formula(source: str) -> None:
    assert show(Document(source), 120) == [[source.replace("**", "").replace("`", "")]]


def test_other_escapes_are_none() -> None:
    assert show(Document(r"\*no\* \_em\_ \# 1\. \$5 `\(`"), 120) == [[r"*no* _em_ # 1. $5 \("]]


def test_a_table_is_not_broken_inside_of_words_and_numbers() -> None:
    source = "| country | population | city | note |\n|---|--:|---|---|\n"
    source += "| Liechtenstein | 1,234,567,890 | Constantinople | " + "some words " * 9 + "|\n"
    for width in range(60, 120):
        text = "\n".join(show(Document(source), width)[0])
        words = ("population", "Liechtenstein", "1,234,567,890", "Constantinople", "words")
        assert all(word in text for word in words), width


@settings(max_examples=EXAMPLES)
@example("$$\\$$", 40)
@given(SOURCES, st.integers(4, 120))
def test_no_line_is_wider_than_the_screen_where_there_is_room(source: str, width: int) -> None:
    for row in Document(source).rows:
        for line in row.lines(max(width, 40), PALETTE):
            assert line.text.cell_len - line.hidden <= max(width, 40), line


@settings(max_examples=EXAMPLES)
@given(SOURCES, st.integers(5, 80))
def test_a_row_is_the_same_after_a_release(source: str, width: int) -> None:
    document = Document(source)
    before = show(document, width)
    for row in document.rows:
        row.release()
        assert row.height(width, PALETTE) == (len(before[document.rows.index(row)]), True)
    assert show(document, width) == before


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("# Title", ["Title"]),
        ("- a\n- b\n  - c", ["• a", "• b", "  • c"]),
        ("9. a\n10. b", [" 9. a", "10. b"]),
        ("- a\n\n- b", ["• a", "", "• b"]),
        ("> a\n> b", ["│ a", "│ b"]),
        ("a\nb", ["a", "b"]),
        ("`<b>` <b>", ["<b> <b>"]),
        ("[x](http://y)", ["x"]),
        ("[good.com](http://y)", ["good.com (http://y)"]),
        ("[](http://y)", [" (http://y)"]),
        ("http://y", ["http://y"]),
        ("```\na\n\nb\n```", ["▎   1 · copy · save", "▎a", "▎", "▎b"]),
        ("```sh\nls\n```", ["▎sh 1 · copy · save", "▎ls"]),
        ("```sh\nls", ["▎sh 1 · copy · save", "▎ls"]),
        ("|a|b|\n|-|-:|\n|1|22|\n|333|4|", ["a   │  b", "────┼───", "1   │ 22", "333 │  4"]),
        ("---", ["─" * 20]),
    ],
)
def test_elements(source: str, lines: list[str]) -> None:
    assert [line for row in show(Document(source), 20) for line in row] == lines


def test_blocks_of_code() -> None:
    assert code_blocks(ANSWER)[0].startswith("def quicksort")
    assert code_blocks("- a\n  ```\n  x\n  ```\n\nb\n\n    y") == ["x\n", "y\n"]
    assert code_blocks("none") == []


@settings(max_examples=EXAMPLES)
@given(st.text(st.characters(codec="utf-8"), max_size=200), st.integers(1, 40))
def test_wrapping_loses_no_character(text: str, width: int) -> None:
    text = clean(text)
    lines = wrap_words(Text(text), width)
    joined = "".join((line.joint if i else "") + line.text.plain for i, line in enumerate(lines))
    assert "".join(joined.split()) == "".join(text.split())
    for hard in text.split("\n"):
        assert "".join(line.text.plain for line in wrap_cells(Text(hard), width)) == hard


def test_control_characters_do_not_pass() -> None:
    assert clean("a\x1b[0m\x9b\x7f\x00b\r\nd\re\tf") == "a\ufffd[0m\ufffd\ufffd\ufffdb\nd\ne   f"


def views_of(texts: list[str]) -> list[MessageView]:
    return [
        MessageView(Message(chat=0, parent=None, role="assistant" if i % 2 else "user", text=text))
        for i, text in enumerate(texts)
    ]


@settings(max_examples=EXAMPLES)
@given(st.lists(SOURCES, min_size=1, max_size=6), st.integers(10, 80), st.data())
def test_a_flow_finds_every_line(texts: list[str], width: int, data: st.DataObject) -> None:
    flow, views = Flow(), views_of(texts)
    flow.measure(views, width, PALETTE)
    top = data.draw(st.integers(0, max(0, flow.height - 1)))
    while flow.draw(top, top + 10):
        flow.measure(views, width, PALETTE)
    while flow.draw_last_guess():
        flow.measure(views, width, PALETTE)
    lines = [line.text.plain for view in views for row in view.rows for line in row.lines(width, PALETTE)]
    assert flow.height == len(lines)
    flow_lines = [flow.line(y) for y in range(flow.height)]
    assert [line.text.plain for line in flow_lines if line is not None] == lines
    assert flow.line(-1) is None
    assert flow.line(flow.height) is None
    for view in views:
        span = flow.span_of(view)
        assert span is not None
        assert all(flow.view_at(y) is view for y in range(*span))


def test_only_text_in_view_is_parsed() -> None:
    flow, views = Flow(), views_of(["q", ANSWER] * 50)
    flow.measure(views, 80, PALETTE)
    flow.draw(flow.height - 30, flow.height)
    assert sum(view.pending for view in views) >= 48


@pytest.mark.parametrize("name", [name for name, theme in BUILTIN_THEMES.items() if not theme.ansi])
def test_every_colour_can_be_read(name: str) -> None:
    from textual.color import Color

    palette = palette_of(name)
    theme = BUILTIN_THEMES[name]
    behind = Color.parse(theme.to_color_system().generate()["background"])
    styles = (palette.text, palette.muted, palette.user, palette.error, palette.link)
    for style in (*styles, *palette.syntax.values()):
        color = style.color
        assert color is not None
        assert color.triplet is not None
        assert contrast(Color(*color.triplet), behind) >= 3


@pytest.mark.parametrize("width", [10, 20, 40, 60, 80, 120, 200])
def test_the_status_line_fits(width: int) -> None:
    stats = AnswerStats(
        tokens_per_second=41.26, first_token_ms=214.0, context_used=1250, context_size=131_072, drafted=96, accepted=71,
        engine="llama", device="cpu",
    )  # fmt: skip
    line = status_text(Status(model="starter", endpoint="http://gpu.local:8000", activity="ready", stats=stats), width)
    if width >= 20:
        assert cell_len(line.plain) <= width
    assert line.plain.startswith("starter")
    if width == 200:
        for part in ("41 tok/s", "1 % of the context", "gpu.local", "F1"):
            assert part in line.plain
        assert "llama" not in line.plain


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (120, "Mistral-Small-3.2-24B-Instruct-2506-Q4_K_M.gguf · ready · 41 tok/s · 1 % of the context"),
        (80, "Mistral-Small-3.2-24B… · ready · 41 tok/s · 1 % of the context"),
        (40, "Mistral-Small-3… · ready"),
    ],
)
def test_a_long_name_leaves_room_for_figures(width: int, expected: str) -> None:
    model = "/models/Mistral-Small-3.2-24B-Instruct-2506-Q4_K_M.gguf"
    stats = AnswerStats(tokens_per_second=41.26, context_used=1250, context_size=131_072)
    line = status_text(Status(model=model, activity="ready", stats=stats), width)
    assert line.plain.startswith(expected)
    assert "F1" in line.plain


@pytest.mark.parametrize(
    ("name", "width", "cut"),
    [
        ("smollm2:135m-q4_1", 17, "smollm2:135m-q4_1"),
        ("smollm2:135m-q4_1", 16, "smollm2:135m-q4…"),
        ("smollm2:135m-q4_1", 13, "smollm2:135m…"),
        ("smollm2:135m-q4_1", 12, "smollm2…"),
        ("x" * 30, 10, "x" * 9 + "…"),
        ("模型-七十億", 8, "模型…"),
        ("abc", 1, "…"),
    ],
)
def test_a_name_is_cut_between_words(name: str, width: int, cut: str) -> None:
    assert cut_name(name, width) == cut


def test_what_an_answer_waits_for_has_room_beside_a_long_name() -> None:
    row = FootRow(["smollm2:135m-q4_1", "loading the model 100 %, 8 s"], kept=2)
    (line,) = row.draw(36, PALETTE)
    assert line.text.plain == "smollm2… · loading the model 100 %,…"


def test_history() -> None:
    history = History(["a", "b"])
    assert history.back("draft") == "b"
    assert history.back("b") == "a"
    assert history.back("a") is None
    assert history.forward("a") == "b"
    assert history.forward("b") == "draft"
    assert history.forward("draft") is None
    history.add("c")
    assert history.back("") == "c"
    history.load(["older"])
    assert [history.back(""), history.back(""), history.back("")] == ["b", "a", "older"], "the walk goes on"


def test_the_package_reads_no_environment() -> None:
    folder = Path(__file__).resolve().parents[2]
    for file in [*(folder / "tui").rglob("*.py"), *(folder / "edgelm" / "chats").glob("*.py")]:
        assert "os.environ" not in file.read_text(encoding="utf-8"), file


def test_a_folded_answer_that_begins_with_code_shows_its_first_line() -> None:
    (line,) = FoldedRow("```python\ndef add(a, b):\n    return a + b\n```\n").draw(80, PALETTE)
    assert line.text.plain == "▸ def add(a, b):  4 lines"


def test_a_folded_answer_tells_its_lines_of_the_screen() -> None:
    (line,) = FoldedRow("word " * 100).draw(60, PALETTE)
    assert line.text.plain.endswith("…  9 lines")


@pytest.mark.parametrize(("more", "end"), [(0, "x"), (1, "  2 lines")])
def test_a_folded_message_as_wide_as_the_text_is_one_line(more: int, end: str) -> None:
    (line,) = FoldedRow("x" * (text_width(60) + more)).draw(60, PALETTE)
    assert line.text.plain.removesuffix("…").endswith(end)


EMOJI = {
    "warning": "x ⚠\ufe0f " * 40,
    "keycap": "1\ufe0f\u20e3" * 60,
    "family": "👩\u200d👩\u200d👧" * 40,
    "flag": "🇩🇪" * 60,
    "skin": "👍🏽" * 60,
}


@pytest.mark.parametrize("text", EMOJI.values(), ids=EMOJI)
def test_emoji_of_several_characters_fit_into_their_room(text: str) -> None:
    for width in (7, 80):
        lines = wrap_cells(Text(text), width)
        assert "".join(line.text.plain for line in lines) == text
        assert max(line.text.cell_len for line in lines) <= width
        for pan in range(0, 30, 3):
            layout = Layout(width=width, y=0, pan=pan, room=width, fill_to=0)
            shown = "".join(segment.text for segment in _moved([(text, Style())], 0, layout, Style()))
            assert cell_len(shown) == width
            assert pan or shown[:-1].rstrip() in text, "no emoji is missing"
