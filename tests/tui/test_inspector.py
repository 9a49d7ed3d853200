"""The inspector: its picture of steps at any width, and the keys and the mouse that go back in them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from rich.cells import cell_len

from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.client.watching import (
    Chunk,
    EngineSeen,
    IdleSeen,
    KVSeen,
    LostSeen,
    Region,
    Seen,
    StepSeen,
    Token,
    read_event,
)
from edgelm.library.progress import size_text
from edgelm.tui.inspector import app as watch_app
from edgelm.tui.inspector.app import WatchApp
from edgelm.tui.inspector.picture import ACCEPTED, FORCED, REFUSED, SAMPLED, Styles, picture
from edgelm.tui.inspector.steps import KEPT_STEPS, Steps
from edgelm.tui.inspector.view import Inspector

ENGINE = EngineSeen("qwen3:4b", "llama", "cpu", 4096, 8192, 4, 1000, 10**9)


def prompt_step(number: int, start: int, computed: int) -> StepSeen:
    chunk = Chunk(7, 1000, 0, start, computed, 0, 0, 0, int(start + computed == 1000))
    return StepSeen(number, 100 + number, 500, 1, 0, (chunk,))


def decoded(
    number: int, *, drafted: int = 0, forced: int = 0, accepted: int = 0, words: str = "", drafted_by: str = ""
) -> StepSeen:
    tokens = tuple(
        Token(word + " ", math.log(0.5), ((word, math.log(0.5)), ("else", math.log(0.25)))) for word in words.split()
    )
    counts = (7, 1000, 0, 1000 + number, 1 + drafted, drafted, forced, accepted, accepted + 1)
    chunk = Chunk(*counts, "req_1", drafted_by=drafted_by, tokens=tokens)
    return StepSeen(number, 100 + number / 10, 100, 1, 2, (chunk,))


def fed(*seen: Seen) -> Steps:
    steps = Steps()
    for one in (ENGINE, *seen):
        steps.take(one)
    return steps


def text_of(steps: Steps, width: int = 100, height: int = 30, bandwidth: float = 0.0) -> str:
    return "\n".join(line.text.plain for line in picture(steps, width, height, bandwidth))


def test_the_two_phases_of_an_answer() -> None:
    steps = fed(prompt_step(1, 0, 512), prompt_step(2, 512, 488))
    assert "prompt 512/1,000" in text_of(steps)
    assert "prompt 1,000/1,000" in text_of(steps)
    assert "1 running, 0 waiting; the step: 500.0 ms, 488 tokens of 1 request, 1 reading its prompt" in text_of(steps)
    steps.take(decoded(3, words="Hello"))
    assert f"{SAMPLED} Hello" in text_of(steps)
    assert "first token after" in text_of(steps)


def test_a_draft_is_marked_as_it_was_taken() -> None:
    line = text_of(fed(decoded(1, drafted=6, forced=2, accepted=4, words="a b c d e"))).splitlines()[3]
    assert FORCED * 2 + ACCEPTED * 2 + SAMPLED + REFUSED * 2 + " a b c d e" in line


def test_speed_and_bytes_are_counted_over_the_last_steps() -> None:
    steps = fed(*(decoded(number, drafted=3, accepted=1) for number in range(1, 40)))
    assert steps.tokens_per_second() == pytest.approx(20, rel=0.1)
    weights, depth = 10**9, 1000 + 39 + 4
    assert steps.bytes_per_token() == pytest.approx((weights + 1000 * depth) / 2)
    assert steps.bytes_per_second() == pytest.approx((weights + 1000 * depth) / 0.1)
    assert "at 50% of what this memory can do" in text_of(steps, bandwidth=2 * (weights + 1000 * depth) / 0.1)
    steps.take(prompt_step(41, 0, 500))
    assert steps.bytes_per_second() is None, "a prompt is limited by the processor"


def test_one_stops_goes_back_and_on() -> None:
    steps = fed(*(decoded(number, words=f"word{number}") for number in range(1, KEPT_STEPS + 100)))
    assert len(steps) == KEPT_STEPS
    steps.move(-10)
    assert steps.is_paused
    assert steps.shown is not None
    assert steps.shown.step.number == KEPT_STEPS + 89
    steps.take(decoded(KEPT_STEPS + 100))
    assert steps.shown.step.number == KEPT_STEPS + 89, "it stays where it was"
    text = text_of(steps)
    assert f"stopped at step {KEPT_STEPS + 89}" in text
    assert "'word589 ' sampled 50.0%" in text
    assert "'else' 25.0%" in text
    steps.move(-10_000)
    assert steps.shown.step.number == 101, "the first that is kept"
    steps.move(10_000)
    assert steps.shown.step.number == KEPT_STEPS + 100
    steps.toggle_pause()
    assert not steps.is_paused
    steps.toggle_pause()
    for number in range(KEPT_STEPS + 101, 2 * KEPT_STEPS + 200):
        steps.take(decoded(number))
    assert steps.shown.step.number > KEPT_STEPS + 100, "the step that was looked at is gone"


def test_the_cache_is_a_map_with_counts() -> None:
    regions = (
        Region("running", 2048, 10**6, own=True, sequence=7),
        Region("running", 2048, 10**6, own=False),
        Region("shared", 1024, 10**6, own=True),
        Region("idle", 1024, 10**6, own=True),
        Region("snapshot", 500, 3 * 10**6, own=True),
        Region("shared_snapshot", 300, 10**6, own=True),
        Region("file", 9000, 10**7, own=False),
    )
    lines = text_of(fed(KVSeen(0.5, regions), decoded(1)), width=83).splitlines()
    assert "KV " + "█" * 20 + "▓" * 20 + "▚" * 10 + "▒" * 10 + "·" * 20 in lines
    _, counts, states = text_of(fed(KVSeen(0.5, regions), decoded(1)), width=200).splitlines()[3:6]
    size = [size_text(nbytes) for nbytes in (10**6, 4 * 10**6, 10**7)]
    assert counts.split("  ")[1:] == [
        f" █ 2,048 yours ({size[0]})",
        f"▓ 2,048 of others ({size[0]})",
        f"▚ 1,024 shared ({size[0]})",
        f"▒ 1,024 idle ({size[0]})",
        "· 2,048 of 8,192 free",
    ]
    assert states == f"   in memory ▤▤ 800 tokens ({size[1]})  on disk + 9,000 tokens ({size[2]})"


def test_sequences_of_one_kind_are_told_apart_in_the_map() -> None:
    sizes = (2048, 1024, 10, 1024)
    regions = tuple(Region("running", tokens, 10**6, own=True, sequence=place) for place, tokens in enumerate(sizes))
    lines = text_of(fed(KVSeen(0.5, regions), decoded(1)), width=83).splitlines()
    assert "KV " + "█" * 20 + "│" + "█" * 9 + "█" + "│" + "█" * 9 + "·" * 39 in lines


def test_a_step_names_who_drafted() -> None:
    steps = fed(*(decoded(number, drafted=3, accepted=2, words="a b c", drafted_by="mtp") for number in (1, 2)))
    assert "▰▰●▱ mtp a b c" in text_of(steps)
    steps.stop_at(2)
    assert "'b ' drafted by mtp" in text_of(steps)
    assert "'c ' sampled" in text_of(steps)
    older_server = text_of(fed(decoded(1, drafted=3, accepted=2, words="a b c")))
    assert "▰▰●▱ a b c" in older_server


def test_unsure_tokens_stand_out() -> None:
    styles = Styles()
    tokens = (Token("a", math.log(0.9)), Token("b", math.log(0.5)), Token("c", math.log(0.1)), Token("d"))
    step = StepSeen(1, 1, 1, 1, 0, (Chunk(7, 10, 0, 10, 4, 3, 0, 3, 4, tokens=tokens),))
    line = next(line for line in picture(fed(step), 100, 30) if line.step == 1).text
    found = {line.plain[span.start : span.end]: span.style for span in line.spans}
    assert (found["b"], found["c"]) == (styles.prompt, styles.refused)
    assert "a" not in found
    assert "d" not in found


def test_speed_has_no_pauses_of_the_engine() -> None:
    first = [decoded(number) for number in range(1, 11)]
    later = [replace(decoded(number), at_s=200 + number / 10) for number in range(11, 21)]
    assert fed(*first, *later).tokens_per_second() == pytest.approx(10, rel=0.01)
    assert fed(*first, later[0]).tokens_per_second() is None


def test_a_step_that_was_lost_cannot_be_shown() -> None:
    steps = fed(*(decoded(number) for number in (1, 2, 50, 51)))
    steps.stop_at(30)
    assert steps.shown is not None
    assert steps.shown.step.number == 50
    assert [shown.step.number for shown in steps.around(3)] == [2, 50, 51]


@pytest.mark.parametrize("width", [1, 20, 60, 200])
@pytest.mark.parametrize("height", [1, 10, 20, 60])
def test_it_fits_any_terminal(width: int, height: int) -> None:
    many = decoded(2, drafted=90, forced=10, accepted=50, words="日本語 " * 40)
    steps = fed(LostSeen(3), KVSeen(1, (Region("running", 9000, 1, own=True),)), prompt_step(1, 0, 10), many)
    for _ in range(2):
        lines = picture(steps, width, height)
        assert 1 <= len(lines) <= height
        assert all(cell_len(line.text.plain) <= width for line in lines)
        steps.toggle_pause()


def test_without_an_engine_or_a_step_it_says_so() -> None:
    assert "no model is loaded" in text_of(Steps())
    assert "made no step" in text_of(fed())
    steps = fed(decoded(1))
    steps.take(IdleSeen())
    assert "no engine" in text_of(steps)
    steps.take(ENGINE)
    assert len(steps) == 0, "another engine, other steps"


def test_an_engine_whose_last_request_ended_is_idle() -> None:
    steps = fed(decoded(1), KVSeen(1, (Region("running", 9, 1, own=True),)))
    assert "1 running, 2 waiting; the step" in text_of(steps)
    steps.take(KVSeen(1, (Region("idle", 9, 1, own=True),)))
    assert "idle; the last step" in text_of(steps)
    assert "running" not in text_of(steps)
    steps.toggle_pause()
    assert "1 running, 2 waiting; the step" in text_of(steps), "as it was then"


def test_tokens_cannot_draw_escapes() -> None:
    steps = fed(decoded(1, words="\x1b[31mred\x07"))
    for _ in range(2):
        assert "\x1b" not in text_of(steps)
        assert "\x07" not in text_of(steps)
        steps.toggle_pause()


@pytest.mark.parametrize(
    "data", ["", "[]", "{", '{"chunks":7}', '{"chunks":[7]}', '{"step":"x","chunks":[{"tokens":[1]}]}']
)
@pytest.mark.parametrize("name", ["step", "kv", "engine", "lost", "idle", "other"])
def test_events_of_any_shape_are_read(name: str, data: str) -> None:
    seen = read_event(name, data)
    if seen is not None and name != "other":
        steps = fed(seen)
        assert picture(steps, 60, 20)
    else:
        assert name == "other" or data in ("", "{")


def test_an_event_is_read_as_the_server_writes_it() -> None:
    chunk = {"sequence": 3, "prompt": 9, "start": 8, "computed": 3, "drafted": 2, "accepted": 1, "new": 2}
    top = [{"id": 1, "text": "a", "logprob": -0.5}]
    tokens = [{"id": 1, "text": "a", "logprob": -0.5, "top": top}, {"id": 2, "text": "b"}]
    document = {"step": 4, "at": 1.5, "ms": 2.5, "running": 1, "waiting": 0, "chunks": [chunk | {"tokens": tokens}]}
    seen = read_event("step", json.dumps(document))
    assert isinstance(seen, StepSeen)
    assert seen.chunks[0].tokens == (Token("a", -0.5, (("a", -0.5),)), Token("b"))
    assert (seen.number, seen.step_ms, seen.chunks[0].num_read) == (4, 2.5, 10)


async def test_keys_in_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    more = asyncio.Event()

    async def watch(*_: object) -> AsyncIterator[Seen]:
        yield ENGINE
        for number in range(1, 51):
            yield decoded(number, words=f"word{number}")
        await more.wait()
        raise EngineError("the connection broke", "start the server again")

    monkeypatch.setattr(watch_app, "watch", watch)
    app = WatchApp("http://x", {}, verify=True)
    async with app.run_test(size=(80, 20)) as pilot:
        inspector = app.query_one(Inspector)
        async with asyncio.timeout(30):
            while len(inspector.steps) < 50:
                await pilot.pause(0.01)
        await pilot.press("left", "left", "pageup", "right")
        assert inspector.steps.shown is not None
        assert inspector.steps.shown.step.number == 29
        await pilot.press("space")
        assert not inspector.steps.is_paused
        await pilot.press("home")
        assert inspector.steps.shown.step.number == 1
        await pilot.press("end")
        assert inspector.steps.shown.step.number == 50
        rows = picture(inspector.steps, inspector.content_size.width, inspector.content_size.height)
        place = next(place for place, line in enumerate(rows) if line.step == 47)
        await pilot.click(Inspector, offset=(5, place))
        assert inspector.steps.shown.step.number == 47
        await pilot.click(Inspector, offset=(5, 0))
        assert not inspector.steps.is_paused
        more.set()
        async with asyncio.timeout(30):
            while app.return_value is None:
                await pilot.pause(0.01)
    assert isinstance(app.return_value, EdgeLMError)
    assert app.return_value.message == "the connection broke"
