"""The styles of the transcript, derived from the theme's colours.

Owns the meaning of each colour. Knows nothing of text and widgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

DRAFTED_SHARES = (0.22, 0.16, 0.12, 0.08)  # of green in the background of drafted words, strongest first
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
    code: Style
    block: Style  # background of a block of code
    link: Style
    bullet: Style
    user: Style
    assistant: Style
    error: Style
    note: Style  # facts about the conversation that the user should notice
    selected: Style
    drafted: Style | None  # background of drafted words; None: they are not tinted
    syntax: Mapping[str, Style]  # by a prefix of pygments' token type; the longest one applies


def make_palette(theme: Theme, variables: Mapping[str, str], *, drafts: bool = False) -> Palette:
    """Return the palette of a theme. `variables` are its CSS variables; `drafts`: tint drafted words."""

    def color(name: str, default: str = "ansi_default") -> Color:
        value = variables.get(name, default)
        try:
            return Color.parse(value)
        except ValueError:  # such as "auto 87%"
            return Color.parse(default)

    background = color("background", "#000000")
    foreground = color("foreground", "#ffffff")

    def paint(name: str, *, bold: bool = False, underline: bool = False) -> Style:
        shade = color(name) if theme.ansi else _readable(color(name), background, foreground)
        return Style(color=shade.rich_color, bold=bold or None, underline=underline or None)

    text = paint("foreground")
    if theme.ansi:
        muted, block = Style(dim=True), Style()
        selected = Style(reverse=True)
        drafted = Style(underline=True)  # none of the 16 colours is both subtle and visible on every background
    else:
        muted = Style(color=_readable(background.blend(foreground, 0.62), background, foreground).rich_color)
        block = Style(bgcolor=background.blend(foreground, 0.07).rich_color)
        selected = Style(bgcolor=color("primary", "#0178d4").rich_color, color=Color.parse("#ffffff").rich_color)
        drafted = Style(bgcolor=_tint(background, color("success", "#4ebf71"), foreground).rich_color)
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
        code=paint("warning") + block,
        block=block,
        link=paint("secondary", underline=True),
        bullet=paint("primary"),
        user=paint("accent", bold=True),
        assistant=paint("primary", bold=True),
        error=paint("error", bold=theme.ansi),
        note=paint("warning"),
        selected=selected,
        drafted=drafted if drafts else None,
        syntax=syntax,
    )


def _readable(color: Color, background: Color, foreground: Color) -> Color:
    """Return a colour, blended with the foreground until it has enough contrast."""
    for tenths in range(10):
        mixed = color.blend(foreground, tenths / 10)
        if contrast(mixed, background) >= MIN_CONTRAST:
            return mixed
    return foreground


def _tint(background: Color, hue: Color, foreground: Color) -> Color:
    """Return the background blended with as much of a hue as keeps the text readable."""
    shades = [background.blend(hue, share) for share in DRAFTED_SHARES]
    return next((shade for shade in shades if contrast(foreground, shade) >= MIN_CONTRAST), shades[-1])


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2, relative luminance)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: Color) -> float:
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in color.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
