"""Pictures in the scheduler and the bookkeeper: chunks of their own, prefixes that end outside of them, positions."""

from __future__ import annotations

import pytest

from edgelm.base.errors import RequestError
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Chunk, PictureSpan, SamplingParams, Sequence, Trim
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.sampling.history import Histories
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from tests.engine.fake import info
from tests.engine.loop import Loop

TEXT = [*range(1, 40), 1]
EYES = list(range(-140, -100))  # a picture of 40 tokens
OTHER = [EYES[0], *range(-240, -201)]  # another, whose first token is the same by chance


def seq_of(number: int, tokens: list[int], *spans: tuple[int, int, int, bool], **params: object) -> Sequence:
    """Return a sequence with pictures: start, tokens, positions, and whether it is one block."""
    seq = Sequence(number, list(tokens), len(tokens), SamplingParams(temperature=0.0, max_tokens=4, **params))  # type: ignore[arg-type]
    seq.pictures = tuple(PictureSpan(*span, None) for span in spans)
    return seq


def chunks_of(loop: Loop, seq: Sequence) -> list[Chunk]:
    """Run a sequence to its end; return its chunks."""
    loop.scheduler.add(seq)
    chunks = []
    while loop.scheduler.num_unfinished:
        loop.step()
        assert loop.last
        chunks += [chunk for chunk in loop.last.chunks if chunk.seq is seq]
    return chunks


@pytest.mark.parametrize("whole", [True, False])
def test_a_picture_has_chunks_of_its_own(whole: bool) -> None:
    loop = Loop(max_tokens=16)
    seq = seq_of(0, TEXT[:20] + EYES + TEXT[:5], (20, 40, 40, whole))
    ends = [chunk.end for chunk in chunks_of(loop, seq)][:6]
    assert ends == ([16, 20, 60, 65, 66, 67] if whole else [16, 20, 36, 52, 60, 65])


def test_a_prefix_ends_outside_of_pictures() -> None:
    loop = Loop()
    chunks_of(loop, seq_of(0, TEXT + EYES + TEXT, (40, 40, 40, True)))
    same = seq_of(1, TEXT + EYES + TEXT[:3], (40, 40, 40, True))
    chunks_of(loop, same)
    other = seq_of(2, TEXT + OTHER + TEXT[:3], (40, 40, 40, True))
    chunks_of(loop, other)
    assert (same.cached, other.cached) == (82, 40)


def test_positions_count_a_picture_as_the_model_does() -> None:
    seq = seq_of(0, TEXT + EYES + TEXT + EYES + TEXT, (40, 40, 8, False), (120, 40, 5, False))
    assert [seq.position(length) for length in (0, 40, 80, 100, 120, 160, 200)] == [0, 40, 48, 68, 88, 93, 133]
    kv = SlotKV(info(context=512, capacity=512), 10**6)
    first = seq_of(1, seq.tokens, (40, 40, 8, False), (120, 40, 5, False))
    assert kv.attach(first)
    assert kv.grow(first, 200)
    first.computed = 200
    kv.release(first)
    kv.take_ops()
    follower = seq_of(2, [*seq.tokens[:100], 9, 9], (40, 40, 8, False))
    assert kv.attach(follower)
    assert follower.computed == 100
    assert [op.length for op in kv.take_ops() if isinstance(op, Trim)] == [68]


def test_only_a_request_with_pictures_may_have_their_tokens() -> None:
    loop = Loop()
    scheduler = Scheduler(loop.info, loop.kv, StepClock())
    params = SamplingParams()
    with pytest.raises(RequestError, match="token id outside"):
        scheduler.check([1, -140], params)
    scheduler.check([1, -140], params, (PictureSpan(1, 1, 1, False, None),))
    with pytest.raises(RequestError, match="token id outside"):
        scheduler.check([1, -140, loop.info.num_vocab], params, (PictureSpan(1, 1, 1, False, None),))


def test_penalties_and_drafts_do_not_see_the_tokens_of_pictures() -> None:
    seq = seq_of(0, [1, 2, *EYES, 1, 2], (2, 40, 40, False), repetition_penalty=1.5)
    history = Histories().of(seq)
    assert history is not None
    assert sorted(history.ids.tolist()) == [1, 2]
    drafter = NgramDrafter()
    drafter.begin(seq)
    assert min(drafter.propose(seq, [0.0] * 8), default=0) >= 0
