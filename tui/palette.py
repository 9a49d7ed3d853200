"""The styles of the transcript, made from the theme's colours.

Owns which colour means what. Knows nothing of text and widgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

DRAFTED_SHARES = (0.22, 0.16, 0.12, 0.08)  # of green, behind what was drafted
MIN_CONTRAST = 4.5  # WCAG 2.2, 1.4.3: text against what is behind it


@dataclass(frozen=True)
class Palette:
    """Every style that the transcript uses."""

    name: str
    text: Style
    muted: Style
    strong: Style
    emphasis: Style
    strike: Style
    heading: Style
    code: Style
    block: Style  # behind a block of code
    link: Style
    bullet: Style
    user: Style
    user_text: Style
    assistant: Style
    error: Style
    note: Style  # what the user ought to know of the conversation
    selected: Style
    drafted: Style | None  # behind what was drafted; None: it is not shown
    syntax: Mapping[str, Style]  # by the first name of pygments' token type that is here


def make_palette(theme: Theme, variables: Mapping[str, str], *, drafts: bool = False) -> Palette:
    """Return the palette of a theme; `variables` are its CSS variables, `drafts`: what was drafted is tinted."""

    def color(name: str, default: str = "ansi_default") -> Color:
        value = variables.get(name, default)
        try:
            return Color.parse(value)
        except ValueError:  # "auto 87%" and its like
            return Color.parse(default)

    behind = color("background", "#000000")
    front = color("foreground", "#ffffff")

    def paint(name: str, *, bold: bool = False, underline: bool = False) -> Style:
        found = color(name) if theme.ansi else _readable(color(name), behind, front)
        return Style(color=found.rich_color, bold=bold or None, underline=underline or None)

    text = paint("foreground")
    if theme.ansi:
        muted, block, user_text = Style(dim=True), Style(), text
        selected = Style(reverse=True)
        drafted = Style(underline=True)  # 16 colours have none that is subtle and seen on every background
    else:
        muted = Style(color=_readable(behind.blend(front, 0.62), behind, front).rich_color)
        block = Style(bgcolor=behind.blend(front, 0.07).rich_color)
        user_text = text
        selected = Style(bgcolor=color("primary", "#0178d4").rich_color, color=Color.parse("#ffffff").rich_color)
        drafted = Style(bgcolor=_tint(behind, color("success", "#4ebf71"), color("foreground", "#ffffff")).rich_color)
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
        user_text=user_text,
        assistant=paint("primary", bold=True),
        error=paint("error", bold=theme.ansi),
        note=paint("warning"),
        selected=selected,
        drafted=drafted if drafts else None,
        syntax=syntax,
    )


def _readable(color: Color, behind: Color, front: Color) -> Color:
    """Return a colour mixed with the text's own until it stands out from the background."""
    for part in range(10):
        mixed = color.blend(front, part / 10)
        if contrast(mixed, behind) >= MIN_CONTRAST:
            return mixed
    return front


def _tint(behind: Color, hue: Color, front: Color) -> Color:
    """Return the background with as much of a hue as leaves the text readable."""
    mixed = [behind.blend(hue, share) for share in DRAFTED_SHARES]
    return next((each for each in mixed if contrast(front, each) >= MIN_CONTRAST), mixed[-1])


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2, relative luminance)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: Color) -> float:
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in color.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
