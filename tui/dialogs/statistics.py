"""The dialog of /stats: sums, a plot of the last days, and a table of the models.

Owns the drawing. plotext is imported with this module, when the dialog is opened for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from rich.color import ANSI_COLOR_NAMES
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static
from textual_plotext import PlotextPlot

from edgelm.chats.statistics import DayFigures, Statistics
from edgelm.tui.dialogs.basic import Dialog
from edgelm.tui.dialogs.stats_text import count_text, day_table, model_table, summary_lines
from edgelm.tui.hints import Hint, footer
from edgelm.tui.lines import clean, short_name

MIN_PLOT = (64, 26)  # cells of the terminal; below, a table of days is in place of the plot
COLOURS = (("primary", "blue+"), ("success", "green+"), ("warning", "orange+"), ("secondary", "magenta+"))
BAR_WIDTH = 0.1  # of a day; plotext widens it to whole cells
MARGIN = 8  # cells around the lines of the dialog
KINDS = ("written", "read", "from the prefix cache")


class Series(NamedTuple):
    """One colour of the plot: its name, and its tokens of each day."""

    name: str
    values: list[int]


class StatsScreen(Dialog[None]):
    """Shows statistics; `m` draws the days by model instead of by kind of token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(None)", "Close", show=False),
        Binding("m", "turn", "By kind or by model", show=False),
    ]
    DEFAULT_CSS = """
    StatsScreen { align: center middle; }
    StatsScreen > Vertical {
        width: 100; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; border-title-color: $foreground; border-subtitle-color: $text-muted;
        background: $surface; padding: 0 1;
    }
    StatsScreen VerticalScroll {
        height: auto; padding: 0 1; scrollbar-size-vertical: 1; background: $surface;
        scrollbar-background: $surface; scrollbar-background-hover: $surface; scrollbar-background-active: $surface;
    }
    StatsScreen Static { height: auto; margin-bottom: 1; }
    StatsScreen #legend { margin: 0; }
    StatsScreen PlotextPlot { height: 12; margin-bottom: 1; }
    StatsScreen .-hidden { display: none; }
    """

    def __init__(self, statistics: Statistics, num_chats: int) -> None:
        super().__init__()
        self._statistics = statistics
        self._num_chats = num_chats
        self._by_model = False

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Statistics of the saved chats"
            with VerticalScroll():
                yield Static("\n".join(summary_lines(self._statistics, self._num_chats)), markup=False)
                yield Static(id="legend", markup=False)
                yield PlotextPlot()
                yield Static(id="models", markup=False)
                yield Static(id="days", markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        self._draw()

    def action_turn(self) -> None:
        """Draw the days by model, or by kind of token."""
        self._by_model = not self._by_model
        self._draw()

    def _draw(self) -> None:
        width, height = self.app.size
        draws = width >= MIN_PLOT[0] and height >= MIN_PLOT[1]
        turn = [Hint("m", "by kind" if self._by_model else "by model", "screen.turn")] if draws else []
        box = self.query_one(Vertical)
        box.border_subtitle = footer([*turn, Hint("Esc", "closes", "screen.dismiss(None)")])
        self.query_one("#models", Static).update(_table_text(model_table(self._statistics, min(width, 100) - MARGIN)))
        self.query_one("#days", Static).update(_table_text(day_table(self._statistics)))
        self.query_one("#days").set_class(draws, "-hidden")
        for drawn in self.query("#legend, PlotextPlot"):
            drawn.set_class(not draws, "-hidden")
        if draws:
            self._plot()

    def _plot(self) -> None:
        widget = self.query_one(PlotextPlot)
        days = self._statistics.days
        series = model_series(self._statistics) if self._by_model else kind_series(days)
        is_ansi = self.app.current_theme.ansi
        variables = self.app.theme_variables
        colours: list[str | tuple[int, int, int]] = []
        legend = Text(f"Tokens {'written ' if self._by_model else ''}in the last {len(days)} days: ")
        for (variable, name), one in zip(COLOURS, series, strict=False):
            rgb = Color.parse(variables[variable]).rgb if not is_ansi else None
            colours.append(rgb or name)
            legend.append("■ ", Style(color=_ansi_name(name) if rgb is None else f"rgb({rgb[0]},{rgb[1]},{rgb[2]})"))
            legend.append(f"{one.name}  ")
        self.query_one("#legend", Static).update(legend)
        widget.theme = "clear" if is_ansi else "auto"
        plot = widget.plt
        plot.clear_data()
        totals = [sum(values) for values in zip(*(one.values for one in series), strict=True)]
        places = [i for i, total in enumerate(totals) if total]  # plotext draws bars of no height over their neighbours
        for number in range(len(series), 0, -1):  # the highest bars first: the others are drawn over them
            heights = [sum(one.values[i] for one in series[:number]) for i in places]
            plot.bar(places, heights, color=colours[number - 1], width=BAR_WIDTH, reset_ticks=False)
        shown = range(len(days) - 1, -1, -5)
        plot.xticks([float(i) for i in shown], [f"{days[i].day:%d %b}" for i in shown])
        plot.xlim(-0.6, len(days) - 0.4)
        highest = max(totals)
        steps = [highest * i // 4 for i in range(5)] if highest >= 4 else [0, highest]
        plot.yticks([float(step) for step in steps], [f"{count_text(step)} " for step in steps])
        plot.frame(False)
        widget.refresh()


def kind_series(days: Sequence[DayFigures]) -> list[Series]:
    """Return the tokens of days by what was done with them."""
    values = ([day.sums.written for day in days], [day.sums.read for day in days], [day.sums.cached for day in days])
    return [Series(name, list(numbers)) for name, numbers in zip(KINDS, values, strict=True)]


def model_series(statistics: Statistics) -> list[Series]:
    """Return the written tokens of days by model: those that wrote the most, and the others together."""
    days = statistics.days
    names = [figures.model for figures in statistics.models if any(figures.model in day.written for day in days)]
    alone = names if len(names) <= len(COLOURS) else names[: len(COLOURS) - 1]
    series = [Series(clean(short_name(name)), [day.written.get(name, 0) for day in days]) for name in alone]
    if len(alone) < len(names):
        others = [sum(day.written.get(name, 0) for name in names[len(alone) :]) for day in days]
        series.append(Series("others", others))
    return series or [Series("nothing", [0 for _ in days])]


def _table_text(lines: Sequence[str]) -> Text:
    head, *others = lines or [""]
    text = Text(head, "bold", no_wrap=True, overflow="ellipsis")
    for line in others:
        text.append(f"\n{line}", "not bold")
    return text


def _ansi_name(name: str) -> str:
    """Return Rich's name of a colour of plotext."""
    rich = {"orange+": "bright_yellow"}.get(name, f"bright_{name.removesuffix('+')}")
    assert rich in ANSI_COLOR_NAMES
    return rich
