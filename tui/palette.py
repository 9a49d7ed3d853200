"""The styles of the transcript, and variables of the style sheets, derived from the theme's colours.

Owns the meaning of each colour, and that it can be read. Knows nothing of text and widgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text
from textual.color import Color
from textual.content import Content, Span
from textual.theme import Theme

from edgelm.tui.control_codes import without_controls
from edgelm.tui.transcript.kitty import KittyPictures
from edgelm.tui.transcript.sixel import SixelPictures

DRAFTED_SHARES = (0.22, 0.16, 0.12, 0.08)  # of green in the background of drafted words, strongest first
ASKED_SHARES = (0.14, 0.1, 0.07, 0.04)  # of the primary colour in the background of the user's messages
BLOCK_SHARES = (0.07, 0.05, 0.03, 0.0)  # of the foreground in the background of code
SELECTION_SHARES = (0.5, 0.4, 0.3, 0.24, 0.18, 0.12)  # of the primary colour in the background of selected text
CURSOR_SHARES = (0.3, 0.24, 0.18, 0.12)  # of the primary colour in the background of a list's chosen line
MUTED_SHARES = (0.62, 0.7, 0.78, 0.86)  # of the foreground in secondary text
BORDER_SHARE = 0.35  # of the foreground in the border of a box without the focus, and in scroll bars
MIN_CONTRAST = 4.5  # WCAG 2.2, 1.4.3: text against its background


@dataclass(frozen=True)
class Palette:
    """Every style of the transcript."""

    name: str
    text: Style
    muted: Style
    strong: Style
    emphasis: Style
    strike: Style
    heading: Style
    asked: Style  # background of the user's messages
    wraps_code: bool  # long lines of code; else they are moved sideways
    code: Style
    block: Style  # background of a block of code
    link: Style
    bullet: Style
    user: Style
    error: Style
    note: Style  # facts about the conversation that the user should notice
    mark: Style  # left of the selected message
    drafted: Style | None  # background of drafted words; None: they are not tinted
    syntax: Mapping[str, Style]  # by a prefix of pygments' token type; the longest one applies
    pictures: KittyPictures | SixelPictures | None = (
        None  # of a terminal that draws them; None: they are made of half blocks
    )


def make_palette(
    theme: Theme,
    variables: Mapping[str, str],
    *,
    drafts: bool = False,
    wraps_code: bool = False,
    pictures: KittyPictures | SixelPictures | None = None,
) -> Palette:
    """Return the palette of a theme. `variables` are its CSS variables; `drafts`: tint drafted words."""

    def color(name: str, default: str = "ansi_default") -> Color:
        value = variables.get(name, default)
        try:
            return Color.parse(value)
        except ValueError:  # such as "auto 87%"
            return Color.parse(default)

    background = color("background", "#000000")
    foreground = color("foreground", "#ffffff")
    behind_code = _shade(background, foreground, BLOCK_SHARES, foreground)
    behind_asked = _shade(background, color("primary"), ASKED_SHARES, foreground)
    backgrounds = (background, behind_code, behind_asked)

    def paint(name: str, *, bold: bool = False, underline: bool = False) -> Style:
        shade = color(name) if theme.ansi else _readable(color(name), backgrounds, foreground)
        return Style(color=shade.rich_color, bold=bold or None, underline=underline or None)

    text = paint("foreground")
    if theme.ansi:
        muted, block, asked = Style(dim=True), Style(), Style()
        drafted = Style(underline=True)  # none of the 16 colours is both subtle and visible on every background
    else:
        shade = _readable(background.blend(foreground, 0.62), backgrounds, foreground)
        muted, block = Style(color=shade.rich_color), Style(bgcolor=behind_code.rich_color)
        asked = Style(bgcolor=behind_asked.rich_color)
        drafted = Style(bgcolor=_shade(background, color("success", "#4ebf71"), DRAFTED_SHARES, foreground).rich_color)
    keyword = paint("accent", bold=True)
    string, number = paint("success"), paint("warning")
    syntax = {
        "Comment": muted + Style(italic=not theme.ansi),
        "Keyword": keyword,
        "Operator.Word": keyword,
        "String": string,
        "Number": number,
        "Literal": number,
        "Name.Function": paint("primary"),
        "Name.Class": paint("primary", bold=True),
        "Name.Decorator": paint("secondary"),
        "Name.Builtin": paint("secondary"),
        "Name.Tag": paint("primary"),
        "Name.Attribute": paint("secondary"),
        "Generic.Deleted": paint("error"),
        "Generic.Inserted": string,
        "Generic.Heading": paint("primary", bold=True),
        "Generic.Subheading": paint("primary"),
    }
    return Palette(
        name=theme.name,
        text=text,
        muted=muted,
        strong=Style(bold=True),
        emphasis=Style(italic=True),
        strike=Style(strike=True),
        heading=paint("primary", bold=True),
        asked=asked,
        wraps_code=wraps_code,
        code=paint("warning") + block,
        block=block,
        link=paint("secondary", underline=True),
        bullet=paint("primary"),
        user=paint("accent", bold=True),
        error=paint("error", bold=theme.ansi),
        note=paint("warning"),
        mark=paint("primary"),
        drafted=drafted if drafts else None,
        syntax=syntax,
        pictures=pictures,
    )


def readable_variables(theme: Theme, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a theme with those replaced whose text is hard to read, or whose focus is hard to see."""
    if theme.ansi:
        # Black and white borders may vanish; a selection in bright blue hides its text.
        selection = {"screen-selection-background": "ansi_cyan", "screen-selection-foreground": "ansi_black"}
        # Dark blue on black is hard to read; bright blue can be read on white, too.
        blues = {name: "ansi_bright_blue" for name, value in variables.items() if value == "ansi_blue" and theme.dark}
        return {**variables, **blues, "border-blurred": "ansi_bright_black", **selection}
    background, foreground = Color.parse(variables["background"]), Color.parse(variables["foreground"])
    surface, boost = Color.parse(variables["surface"]), Color.parse(variables["boost"])
    panes = [background, surface, Color.parse(variables["panel"])]
    panes += [pane + boost for pane in panes]
    primary = Color.parse(variables["primary"])
    shades = [background.blend(foreground, share) for share in MUTED_SHARES]
    choices = [(share, shade) for share in CURSOR_SHARES for shade in shades]
    # Not every theme's foreground can be read on all of its own panes: black or white can.
    for percent in (70, 80, 90, 100):
        choices += [(share, background + background.get_contrast_text(percent / 100)) for share in CURSOR_SHARES]
    share, muted = next(
        (choice for choice in choices if _can_read(choice[1], [*panes, surface.blend(primary, choice[0])])), choices[-1]
    )
    cursor, blurred = surface.blend(primary, share), surface.blend(primary, share / 2)
    border = background.blend(foreground, BORDER_SHARE).hex
    selected = _shade(background, primary, SELECTION_SHARES, foreground)
    return {
        **variables,
        "text-muted": muted.hex,
        "text-disabled": muted.hex,
        "block-cursor-background": cursor.hex,
        "block-cursor-foreground": "auto 87%",
        "block-cursor-text-style": "bold",
        "block-cursor-blurred-background": blurred.hex,
        "border-blurred": border,
        # Textual's own foreground is transparent: drawn by `transcript.py`, selected text would vanish.
        "screen-selection-background": selected.hex,
        "screen-selection-foreground": _readable(foreground, [selected], selected.get_contrast_text(1.0)).hex,
        "scrollbar": border,
        "scrollbar-background": background.hex,
        "scrollbar-background-hover": background.hex,
        "scrollbar-background-active": background.hex,
    }


def list_text(text: Text, theme: Theme) -> Content:
    """Return a text of a list, in which `dim` is secondary text that can be read: 16 colours have none but dim."""
    muted = "dim" if theme.ansi else "$text-muted"
    spans = [Span(start, end, str(style).replace("dim", muted)) for start, end, style in text.spans if style]
    if text.style:
        spans.insert(0, Span(0, len(text.plain), str(text.style).replace("dim", muted)))
    return Content(without_controls(text.plain), spans)


def _can_read(text: Color, backgrounds: Sequence[Color]) -> bool:
    return all(contrast(text, background) >= MIN_CONTRAST for background in backgrounds)


def _readable(color: Color, backgrounds: Sequence[Color], foreground: Color) -> Color:
    """Return a colour, blended with the foreground until it has enough contrast."""
    for tenths in range(10):
        mixed = color.blend(foreground, tenths / 10)
        if _can_read(mixed, backgrounds):
            return mixed
    return foreground


def _shade(background: Color, hue: Color, shares: Sequence[float], text: Color) -> Color:
    """Return the background blended with as much of a hue as keeps a text readable."""
    shades = [background.blend(hue, share) for share in shares]
    return next((shade for shade in shades if contrast(text, shade) >= MIN_CONTRAST), shades[-1])


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2, relative luminance)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: Color) -> float:
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in color.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
