"""The picture of an engine's steps: lines of text for any width and height.

Owns the marks, the colours and the wording of requests, steps, tokens and the KV cache. Knows nothing of widgets and
connections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from edgelm.client.watching import Chunk, KVSeen, Region, StepSeen, Token
from edgelm.library.progress import size_text
from edgelm.tui.inspector.steps import Shown, Steps
from edgelm.tui.lines import clean, short_name

MAX_ROWS = 48  # of a chunk that are drawn one by one
MAX_DETAILS = 8  # tokens of a step
ACCEPTED, REFUSED, FORCED, SAMPLED = "▰", "▱", "▪", "●"  # told apart without colours, too
YOURS, OTHERS, SHARED, IDLE, FREE = "█", "▓", "▚", "▒", "·"  # of the KV cache
BORDER = "│"  # between two sequences or prefixes of one kind
STATE = "▤"  # a saved state
LEGEND = f"{SAMPLED} sampled  {ACCEPTED} drafted, accepted  {REFUSED} drafted, refused  {FORCED} forced by a grammar"
KEYS = "Space stops and goes on · ← → one step · PgUp PgDn 20 · Home End · Esc leaves"
UNLIKELY, UNSURE = 0.2, 0.6  # probabilities of tokens that are marked


@dataclass(frozen=True, slots=True)
class Styles:
    """The styles of the picture, as Rich names them."""

    strong: str = "bold"
    muted: str = "dim"
    accepted: str = "green"
    refused: str = "red"
    forced: str = "blue"
    prompt: str = "yellow"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the picture; `step` is the number of the step that it shows."""

    text: Text
    step: int | None = None


def picture(steps: Steps, width: int, height: int, bandwidth: float = 0.0, styles: Styles | None = None) -> list[Line]:
    """Return the lines of the picture: at most `height`, of at most `width` cells.

    `bandwidth` is that of the machine's memory in bytes per second; 0: not known.
    """
    styles = styles or Styles()
    shown = steps.shown
    top = [_title(steps, styles), *_figures(steps, bandwidth, styles)]
    if shown is None:
        empty = "no model is loaded" if steps.engine is None else "the engine is idle: it has made no step since"
        return _fitted([*map(Line, top), Line(Text(empty, styles.muted))], width, height)
    kv = shown.kv if steps.is_paused else steps.kv
    if kv is not None and steps.engine is not None:
        top += _cache(kv, steps.engine.capacity, width, styles)
    details = _details(shown.step, styles) if steps.is_paused else []
    # A low terminal shows steps instead of the legend.
    bottom = [Text(LEGEND, styles.muted), Text(KEYS, styles.muted)] if height >= 16 else []
    room = max(height - len(top) - len(details) - len(bottom), 3)
    rows = [
        Line(_step_line(one, one is shown and steps.is_paused, width, styles), one.step.number)
        for one in steps.around(room)
    ]
    return _fitted([*map(Line, top), *rows, *map(Line, (*details, *bottom))], width, height)


def _fitted(lines: list[Line], width: int, height: int) -> list[Line]:
    for line in lines:
        line.text.truncate(max(width, 1), overflow="ellipsis")
        line.text.no_wrap = True
    return lines[:height]


def _title(steps: Steps, styles: Styles) -> Text:
    engine = steps.engine
    if engine is None:
        return Text("no engine", styles.strong)
    line = Text()
    line.append(clean(short_name(engine.model)), styles.strong)
    if steps.is_paused and steps.shown is not None:
        line.append(f"  stopped at step {steps.shown.step.number:,}", styles.prompt)
    line.append(f"  {engine.engine}/{engine.device}, context {engine.context:,}, {engine.slots} slots", styles.muted)
    if steps.num_lost:
        line.append(f"  {steps.num_lost:,} events lost", styles.refused)
    return line


def _figures(steps: Steps, bandwidth: float, styles: Styles) -> list[Text]:
    """Return the lines of the batch, the queue and the speed."""
    if steps.shown is None:
        return []
    step = steps.shown.step
    prompts = sum(chunk.is_prompt for chunk in step.chunks)
    is_idle = not steps.is_paused and steps.kv is not None and all(r.kind != "running" for r in steps.kv.regions)
    now = "idle; the last step" if is_idle else f"{step.running} running, {step.waiting} waiting; the step"
    line = Text(f"{now}: {step.step_ms:,.1f} ms, ")
    line.append(f"{_counted(sum(chunk.computed for chunk in step.chunks), 'token')}")
    line.append(f" of {_counted(len(step.chunks), 'request')}")
    if prompts:
        line.append(f", {prompts} reading {'its prompt' if prompts == 1 else 'prompts'}", styles.prompt)
    speed = Text()
    if (tokens := steps.tokens_per_second()) is not None:
        speed.append(f"{tokens:,.1f} tok/s")
    if (first := _first_token_s(steps, step)) is not None:
        unit = f"{first:,.2f} s" if first >= 0.1 else f"{1000 * first:,.0f} ms"
        speed.append(f"{'  ' if speed else ''}first token after {unit}")
    if (nbytes := steps.bytes_per_token()) is not None:
        speed.append(f"{'  ' if speed else ''}{size_text(round(nbytes))} read for a token")
    if bandwidth and (read := steps.bytes_per_second()) is not None:
        speed.append(f", at {min(read / bandwidth, 9.99):.0%} of what this memory can do")
    return [line, speed] if speed else [line]


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _first_token_s(steps: Steps, step: StepSeen) -> float | None:
    """Return the time to the first token of the newest request in a step, since it was admitted."""
    for chunk in reversed(step.chunks):
        request = steps.requests.get(chunk.sequence)
        if request is not None and request.first_token_s is not None:
            return request.first_token_s - request.began_s
    return None


def _cache(kv: KVSeen, capacity: int, width: int, styles: Styles) -> list[Text]:
    """Return the map of the KV cache with its counts, and the saved states outside of it."""
    parts = (
        (YOURS, "yours", styles.accepted, [r for r in kv.regions if r.kind == "running" and r.own]),
        (OTHERS, "of others", styles.prompt, [r for r in kv.regions if r.kind == "running" and not r.own]),
        (SHARED, "shared", styles.forced, [r for r in kv.regions if r.kind == "shared"]),
        (IDLE, "idle", styles.muted, [r for r in kv.regions if r.kind == "idle"]),
    )
    label = "KV "
    cells = max(width - len(label), 8)
    line, used, num_used = Text(label), 0, 0
    counts = Text("   ")
    for mark, name, style, regions in parts:
        num_tokens = sum(region.tokens for region in regions)
        if num_tokens or mark == YOURS:
            counts.append(f"{mark} ", style)
            counts.append(
                f"{num_tokens:,} {name} ({_size(regions)})  " if num_tokens else f"none {name}  ", styles.muted
            )
        for place, region in enumerate(regions):
            drawn = min(math.ceil(cells * region.tokens / max(capacity, 1)), cells - used)
            border = BORDER if place and drawn > 1 else ""  # to the one of its kind before it
            line.append(border + mark * (drawn - len(border)), style)
            used += drawn
        num_used += num_tokens
    line.append(FREE * (cells - used), styles.muted)
    counts.append(f"{FREE} {max(capacity - num_used, 0):,} of {capacity:,} free", styles.muted)
    states = _states(kv.regions, styles)
    return [line, counts, states] if states else [line, counts]


def _states(regions: Sequence[Region], styles: Styles) -> Text:
    """Return the line of the states that can come back into the cache: a mark for one of the reader's own."""
    line = Text()
    for name, kinds in (("in memory", ("snapshot", "shared_snapshot")), ("on disk", ("file",))):
        states = [region for region in regions if region.kind in kinds]
        if not states:
            continue
        line.append(f"{'  ' if line else '   '}{name} ", styles.muted)
        for region in states[:MAX_ROWS]:
            style = styles.forced if region.kind == "shared_snapshot" else styles.muted
            line.append(STATE if region.own else "+", style)
        num_tokens = sum(region.tokens for region in states)
        line.append(f" {_counted(num_tokens, 'token')} ({_size(states)})", styles.muted)
    return line


def _size(regions: Iterable[Region]) -> str:
    return size_text(sum(region.bytes for region in regions))


def _step_line(shown: Shown, is_selected: bool, width: int, styles: Styles) -> Text:
    """Return the line of a step: its number and time, and its chunk of each request."""
    step = shown.step
    line = Text(f"{'▶' if is_selected else ' '}{step.number:>7,} {step.step_ms:>8,.1f} ms ")
    for place, chunk in enumerate(step.chunks):
        line.append(" │ " if place else "", styles.muted)
        line.append_text(_chunk(chunk, styles))
        if cell_len(line.plain) > width:
            break
    if is_selected:
        line.stylize(styles.strong)
    return line


def _chunk(chunk: Chunk, styles: Styles) -> Text:
    text = Text()
    if chunk.is_prompt:
        read = min(chunk.start + chunk.computed, chunk.prompt)
        text.append(f"prompt {read:,}/{chunk.prompt:,}", styles.prompt)
        text.append(f" ({chunk.cached:,} cached)" if chunk.cached else "", styles.muted)
        text.append(f" {SAMPLED}" if chunk.new else "")
    else:
        text.append_text(_rows(chunk, styles))
        text.append(f" {clean(chunk.drafted_by)}" if chunk.drafted_by else "", styles.muted)
    text.append(" " if chunk.tokens else "")
    for token in chunk.tokens:
        text.append(clean(token.text.replace("\n", "⏎")), _sureness(token, styles))
    if chunk.finish_reason:
        text.append(f" ■ {clean(chunk.finish_reason)}", styles.strong)
    return text


def _sureness(token: Token, styles: Styles) -> str:
    """Return the style of a token by its probability: unlikely and unsure ones stand out."""
    if token.logprob is None or (probability := math.exp(token.logprob)) >= UNSURE:
        return ""
    return styles.refused if probability < UNLIKELY else styles.prompt


def _rows(chunk: Chunk, styles: Styles) -> Text:
    """Return a mark for each row of a step: the draft tokens, accepted or refused, and the token behind them."""
    accepted = min(chunk.accepted, chunk.drafted)
    forced = min(chunk.forced, accepted)
    text = Text()
    for mark, count, style in (
        (FORCED, forced, styles.forced),
        (ACCEPTED, accepted - forced, styles.accepted),
        (SAMPLED, chunk.new - accepted, ""),
        (REFUSED, chunk.drafted - accepted, styles.refused),
    ):
        text.append(mark * min(max(count, 0), MAX_ROWS), style)
    return text


def _details(step: StepSeen, styles: Styles) -> list[Text]:
    """Return the tokens of a step with their origins, probabilities and alternatives."""
    lines = [
        _token_line(token, place, chunk, styles) for chunk in step.chunks for place, token in enumerate(chunk.tokens)
    ]
    hidden = len(lines) - MAX_DETAILS
    return lines[:MAX_DETAILS] + ([Text(f"  and {hidden:,} more", styles.muted)] if hidden > 0 else [])


def _token_line(token: Token, place: int, chunk: Chunk, styles: Styles) -> Text:
    drafted = f"drafted by {clean(chunk.drafted_by)}" if chunk.drafted_by else "drafted"
    origin = "forced" if place < chunk.forced else drafted if place < chunk.accepted else "sampled"
    line = Text("  ")
    line.append(repr(clean(token.text)), styles.strong)
    line.append(f" {origin}", styles.muted)
    if token.logprob is not None:
        line.append(f" {math.exp(token.logprob):.1%}")
        line.append(f"  {_alternatives(token.top)}", styles.muted)
    return line


def _alternatives(top: Iterable[tuple[str, float]]) -> str:
    return "  ".join(f"{clean(text)!r} {math.exp(value):.1%}" for text, value in top)
