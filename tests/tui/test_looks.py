"""The looks of the chat: contrast, the width of text, and the focus, in every theme and size."""

from __future__ import annotations

import pytest
from rich.color import ColorType
from textual.color import Color
from textual.geometry import Offset
from textual.theme import BUILTIN_THEMES

from edgelm.tui.lines import COLUMN, GUTTER, TEXT_WIDTH, margin
from edgelm.tui.palette import MIN_CONTRAST, contrast, make_palette, readable_variables
from edgelm.tui.transcript.document import Document
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import FakeEndpoint
from tests.tui.test_transcript import PALETTE

FULL_COLOUR = [name for name, theme in BUILTIN_THEMES.items() if not theme.ansi]
PROSE = "word " * 60
WIDE = "```\n" + "x" * 130 + "\n```\n\n| a | b |\n|---|---|\n| " + "y" * 60 + " | " + "z" * 60 + " |\n"


@pytest.mark.parametrize("name", FULL_COLOUR)
def test_secondary_text_can_be_read_on_every_pane_and_on_the_chosen_line_of_a_list(name: str) -> None:
    theme = BUILTIN_THEMES[name]
    variables = readable_variables(theme, {**theme.to_color_system().generate(), **theme.variables})
    panes = [Color.parse(variables[pane]) for pane in ("background", "surface", "panel")]
    panes += [pane + Color.parse(variables["boost"]) for pane in panes]
    panes += [Color.parse(variables[f"block-cursor-{kind}background"]) for kind in ("", "blurred-")]
    for text in ("text-muted", "text-disabled"):
        assert min(contrast(Color.parse(variables[text]), pane) for pane in panes) >= MIN_CONTRAST
    surface, cursor = Color.parse(variables["surface"]), Color.parse(variables["block-cursor-background"])
    assert contrast(cursor, surface) >= 1.15  # it is also bold, and a bar stands beside the list
    assert contrast(Color.parse(variables["border-blurred"]), panes[0]) >= 1.5


async def test_16_colours_mark_the_open_chat_and_have_no_dark_blue_on_black(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("Hello")
        chat.app.theme = "ansi-dark"
        await chat.pilot.pause()
        options = chat.screen.sidebar.query_one("OptionList")
        assert not options.has_focus
        style = options.get_component_rich_style("option-list--option-highlighted")
        plain = options.get_component_rich_style("option-list--option")
        assert style.bgcolor != plain.bgcolor
        assert style.color != style.bgcolor
        color = chat.transcript.palette.heading.color
        assert color is not None
        assert color.number == 12


async def test_selected_text_can_be_read_in_every_theme(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        for name in BUILTIN_THEMES:
            chat.app.theme = name
            await chat.pilot.pause()
            style = chat.app.screen.get_component_rich_style("screen--selection")
            assert style.color is not None, name
            assert style.bgcolor is not None, name
            one, other = (Color(*part.get_truecolor()) for part in (style.color, style.bgcolor))
            assert contrast(one, other) >= (MIN_CONTRAST if name in FULL_COLOUR else 4.0), name


@pytest.mark.parametrize("name", FULL_COLOUR)
def test_every_colour_of_the_conversation_can_be_read_also_in_code(name: str) -> None:
    theme = BUILTIN_THEMES[name]
    palette = make_palette(theme, theme.to_color_system().generate())
    background = Color.parse(theme.to_color_system().generate()["background"])
    block = palette.block.bgcolor
    assert block is not None
    assert block.triplet is not None
    asked = palette.asked.bgcolor
    assert asked is not None
    assert asked.triplet is not None
    styles = (palette.text, palette.muted, palette.user, palette.heading, palette.error, palette.link, palette.note)
    for style in (*styles, *palette.syntax.values()):
        assert style.color is not None
        assert style.color.triplet is not None
        shade = Color(*style.color.triplet)
        assert contrast(shade, background) >= MIN_CONTRAST
        assert contrast(shade, Color(*block.triplet)) >= MIN_CONTRAST
        assert contrast(shade, Color(*asked.triplet)) >= MIN_CONTRAST


@pytest.mark.parametrize("name", [name for name, theme in BUILTIN_THEMES.items() if theme.ansi])
def test_themes_of_16_colours_use_only_these(name: str) -> None:
    theme = BUILTIN_THEMES[name]
    palette = make_palette(theme, {**theme.to_color_system().generate(), **theme.variables})
    styles = [style for style in vars(palette).values() if hasattr(style, "color")]
    for color in [part for style in (*styles, *palette.syntax.values()) for part in (style.color, style.bgcolor)]:
        assert color is None or color.type in (ColorType.STANDARD, ColorType.DEFAULT)


@pytest.mark.parametrize("width", [40, 57, 90, 120, 200])
def test_an_answer_is_one_block_of_what_is_read_well(width: int) -> None:
    rows = Document(f"{PROSE}\n\n- {PROSE}\n\n{WIDE}").rows
    room = min(width, TEXT_WIDTH)
    lines = [row.lines(width, PALETTE) for row in rows]
    assert all(line.text.cell_len - line.hidden <= room for row in lines for line in row)
    prose, _, code, table = (max(line.text.cell_len for line in row) for row in lines)
    assert room - len("word ") <= prose
    assert code == 131  # it is moved sideways
    assert table <= max(room, 67)  # no word of it is broken, unless it is very long
    assert {line.fill_to for line in lines[2]} == {room}


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (110, 34), (160, 45), (220, 60)])
async def test_title_text_and_prompt_share_one_column(
    open_chat: Open, endpoint: FakeEndpoint, size: tuple[int, int]
) -> None:
    endpoint.answers = ["Short."]
    async with open_chat(size=size) as chat:
        await chat.ready()
        await chat.ask("Begin")
        await chat.sees("Short.")
        pane = chat.screen.pane.region
        left = pane.x + margin(pane.width) + GUTTER
        lines = chat.text.split("\n")
        assert lines[0][left:].startswith("Begin")
        assert lines[1][left:].strip() == ""  # space between the title and the first message
        assert lines[2][left:].startswith("Begin")
        assert lines[3][left:].strip() == ""
        assert lines[4][left:].startswith("Short.")
        assert chat.prompt.content_region.x == left
        assert chat.prompt.region.width == min(pane.width, COLUMN)
        assert chat.prompt.region.right <= size[0]


def marks(chat: Driver) -> str:
    """Return the column left of the conversation's text."""
    pane = chat.screen.pane.region
    region = chat.transcript.region
    column = pane.x + margin(pane.width)
    return "".join(line.ljust(column + 1)[column] for line in chat.text.split("\n")[region.y : region.bottom])


async def test_the_focus_is_visible_wherever_the_conversation_is_scrolled(
    open_chat: Open, endpoint: FakeEndpoint
) -> None:
    endpoint.answers = [PROSE * 10]
    async with open_chat(size=(80, 24)) as chat:
        await chat.ready()
        await chat.ask("Begin")
        await chat.ask("Go on")
        assert set(marks(chat)) <= {" ", "▌"}
        await chat.press("shift+tab")
        await chat.until(lambda: "┃" in marks(chat), "the selected message")
        await chat.press("home")
        await chat.until(lambda: "Begin" in chat.text and set(marks(chat)) == {"▌", "▏"}, "the focus")
        await chat.press("escape")
        await chat.until(lambda: set(marks(chat)) == {" ", "▌"}, "nothing but the user's messages")


async def test_a_drag_from_the_margin_selects_whole_lines(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["One two.\n\nThree four.\n\nFive six."]
    async with open_chat(size=(160, 30)) as chat:
        await chat.ready()
        await chat.ask("Begin")
        await chat.until(lambda: "Five six." in chat.text, "the answer on the screen")
        lines = chat.text.split("\n")
        first = next(i for i, line in enumerate(lines) if "One two." in line)
        left = chat.transcript.region.x + 3
        await chat.pilot.mouse_down(offset=Offset(left, first))
        await chat.pilot.hover(offset=Offset(left, first + 4))
        await chat.pilot.mouse_up(offset=Offset(left, first + 4))
        await chat.press("ctrl+c")
        await chat.until(lambda: chat.app.clipboard, "a text")
        assert chat.app.clipboard == "One two.\n\nThree four."


async def test_a_frame_draws_only_lines_that_changed(open_chat: Open) -> None:
    async with open_chat() as driver:
        await driver.ask("Hello")
        transcript = driver.transcript
        transcript.follow()
        await driver.pilot.pause()
        transcript._repaint_regions.clear()
        transcript.follow()
        assert not transcript._repaint_regions, "nothing has changed"
        transcript.views[-1].set_model("another")
        transcript.follow()
        assert [region.height for region in transcript._repaint_regions] == [1], "the line with its name"
