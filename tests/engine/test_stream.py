"""A stream's reader is woken for the first and last event at once, and not for each token of a fast model."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import closing

from edgelm.engine.core import Event, FinishReason
from edgelm.engine.stream import FAST_GAP_S, MANY, MIN_GAP_S, Mailbox, Stream

TURNS = 5  # of the loop, until everything that is due has run


class StillLoop(asyncio.SelectorEventLoop):
    """A loop whose time is set by the test."""

    now = 100.0

    def time(self) -> float:
        return self.now


def wake_ups(*posts: tuple[float, FinishReason | None]) -> list[list[int]]:
    """Post an event at each time, in seconds; return which events the reader had when it was woken."""
    taken: list[list[int]] = []

    async def read(mailbox: Mailbox) -> None:
        async for event in Stream(mailbox, lambda _: None):
            taken[-1].append(event.seq_id)

    async def run_turns() -> None:
        taken.append([])
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def run(loop: StillLoop) -> None:
        mailbox = Mailbox(loop)
        reading = asyncio.ensure_future(read(mailbox))
        for number, (at, reason) in enumerate(posts):
            loop.now = 100 + at
            await run_turns()  # timers that are due
            event = Event(number, finish_reason=reason)
            if mailbox.post(event):
                mailbox.notice(event)
            await run_turns()
        await reading

    with closing(StillLoop()) as loop:
        loop.run_until_complete(run(loop))
    return [events for events in taken if events]


def test_a_slow_model_wakes_its_reader_for_each_token() -> None:
    gap = MIN_GAP_S * 1.01
    assert wake_ups((0, None), (gap, None), (2 * gap, "stop")) == [[0], [1], [2]]


def test_a_fast_model_wakes_its_reader_for_several_tokens() -> None:
    gap = MIN_GAP_S / 3
    posts = [(number * gap, None) for number in range(9)]
    assert wake_ups(*posts, (8.5 * gap, "stop")) == [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_a_model_that_decodes_faster_than_anybody_reads_wakes_its_reader_less_often() -> None:
    gap = MIN_GAP_S / (MANY + 1)
    times = [number * gap for number in range(26)]
    taken = wake_ups(*((at, None) for at in times), (25.5 * gap, "stop"))
    ends = [times[events[-1]] for events in taken[:-1]]
    assert [len(events) for events in taken[:2]] == [1, MANY]
    assert all(later - earlier > FAST_GAP_S - gap for earlier, later in itertools.pairwise(ends[1:]))


def test_what_waits_is_delivered_without_another_token() -> None:
    assert wake_ups((0, None), (MIN_GAP_S / 2, None), (10, "stop")) == [[0], [1], [2]]


def test_the_loop_sleeps_until_the_reader_may_be_woken() -> None:
    with closing(StillLoop()) as loop:
        mailbox = Mailbox(loop)
        first = Event(0)
        assert mailbox.post(first)
        mailbox.notice(first)
        assert not mailbox.post(Event(0))
        assert mailbox.post(Event(0, finish_reason="stop"))


def test_an_event_that_is_posted_while_the_loop_looks_is_not_left() -> None:
    was_noticed = []

    class Posting(Mailbox):
        """Its engine posts an event at the moment from which on the loop looks no more."""

        def _end_gap(self) -> None:
            super()._end_gap()
            was_noticed.append(self.post(Event(1)))

    with closing(StillLoop()) as loop:
        mailbox = Posting(loop)
        mailbox.notice(Event(0))
        loop.now += MIN_GAP_S
        loop.run_until_complete(asyncio.sleep(0))
    assert was_noticed == [True]
