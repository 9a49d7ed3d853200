"""A model that sees: the same log-probabilities as libmtmd's own loop, whatever was cached, drafted or runs beside."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edgelm.backends.llama.build as build_module
from edgelm.backends.build import build
from edgelm.backends.llama.api import fill_struct, logits_view
from edgelm.backends.llama.binding import L, load_mtmd
from edgelm.backends.llama.executor import LlamaOptions, context_params
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.projector import Projector
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, ModelError, NotSeenError, RequestError
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.base.workers.pictures import decode_picture
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.speculation import throttle
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from edgelm.jobs.request import AnswerRequest
from edgelm.text.message_forms import picture_part
from tests.seeing import KINDS, Kind, png, write_pair
from tests.seeing_model import CONTEXT, NUM_TOKENS, asking, picture, require_libmtmd, seeing
from tests.tiny import write_tiny

require_libmtmd()

FLOOR = 0.02  # log-probabilities: a chunk of another length, and keys of 16 bits
SIZES = ((128, 128), (200, 120), (61, 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    for kind in KINDS:
        write_pair(root / kind, kind)
    return root


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Places for drafts, whose rows cost next to nothing: the steps of a tiny model are too short to be measured."""
    costs = [Measured(1, 0, 0.010), Measured(64, 0, 0.0163)]
    monkeypatch.setattr(build_module, "measured_clock", lambda *_: StepClock(StepCosts(costs)))
    monkeypatch.setattr(StepClock, "observe", lambda *_: None)
    return Places({f"EDGELM_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "CACHE")})


def by_libmtmd(folder: Path, kind: Kind, prompt: str, files: Sequence[bytes]) -> tuple[list[int], list[Any], int]:
    """Return greedy tokens, their log-probabilities and the length of a prompt, by libmtmd's own loop.

    `prompt` has libmtmd's marker where pictures are.
    """
    mtmd: Any = load_mtmd()
    model = LlamaModel(folder / kind / f"tiny-{kind}.gguf")
    eyes = Projector(folder / kind / f"mmproj-tiny-{kind}.gguf", model, 2)
    options = LlamaOptions(context=CONTEXT, max_sequences=1, threads=2, picture_tokens=eyes.max_tokens * eyes.whole)
    context: Any = L.llama_init_from_model(model.native, context_params(options, model.num_heads))
    pictures = [decode_picture(data) for data in files]
    bitmaps = (ctypes.c_void_p * len(files))(
        *(mtmd.mtmd_bitmap_init(one.width, one.height, (ctypes.c_uint8 * len(one.rgb))(*one.rgb)) for one in pictures)
    )
    text = prompt.encode()
    given = fill_struct(mtmd.mtmd_input_text(), text=text, text_len=len(text), add_special=False, parse_special=True)
    chunks = mtmd.mtmd_input_chunks_init()
    assert mtmd.mtmd_tokenize(eyes._context, chunks, ctypes.byref(given), bitmaps, len(files)) == 0
    length = sum(
        mtmd.mtmd_input_chunk_get_n_tokens(mtmd.mtmd_input_chunks_get(chunks, index))
        for index in range(mtmd.mtmd_input_chunks_size(chunks))
    )
    past = L.llama_pos(0)
    assert mtmd.mtmd_helper_eval_chunks(eyes._context, context, chunks, 0, 0, 256, True, ctypes.byref(past)) == 0
    ids, rows, position = [], [], past.value
    for _ in range(NUM_TOKENS):
        logits = logits_view(context, 1, model.num_vocab)[0].astype(np.float64)
        rows.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        ids.append(int(logits.argmax()))
        batch = L.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0], batch.n_seq_id[0] = 1, ids[-1], position, 1
        batch.seq_id[0][0], batch.logits[0] = 0, 1
        assert L.llama_decode(context, batch) == 0
        L.llama_batch_free(batch)
        position += 1
    L.llama_free(context)
    eyes.close()
    model.close()
    return ids, rows, length


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_picture_is_read_as_libmtmd_itself_reads_it(folder: Path, kind: Kind, size: tuple[int, int]) -> None:
    files = [png(*size, seed=1), png(*size, seed=2)]
    mark = load_mtmd().mtmd_default_marker().decode()
    prompt = f"<s><|im_start|>user\nThis {mark} or {mark}?<|im_end|>\n<|im_start|>assistant\n"
    ids, rows, length = await asyncio.to_thread(by_libmtmd, folder, kind, prompt, files)
    async with seeing(folder / kind / f"tiny-{kind}.gguf") as model:
        answer = await model.ask(asking("This ", picture(*size, 1), " or ", picture(*size, 2), "?"))
    assert answer.stats.prompt_tokens == length
    assert answer.ids == ids
    for top, row in zip(answer.tops, rows, strict=True):
        assert max(abs(logprob - row[token]) for token, logprob in top.items()) < FLOOR


@pytest.mark.parametrize("kind", KINDS)
async def test_cached_pictures_serve_equal_pictures_only(folder: Path, kind: Kind) -> None:
    model = folder / kind / f"tiny-{kind}.gguf"
    question = asking("This is what I saw in the garden today: ", picture(), " What is it?")
    other = asking("This is what I saw in the garden today: ", picture(seed=3), " What is it?")
    async with seeing(model) as one:
        first, strange = await one.ask(question), await one.ask(other)
        more = [question, {"role": "assistant", "content": first.text}, asking("And this? ", picture(seed=3))]
        again, turn = await one.ask(question), await one.ask(*more)
    async with seeing(model, prefix_cache_ram=0.0) as alone:
        assert (await alone.ask(other)).ids == strange.ids
        fresh = await alone.ask(*more)
    assert strange.ids != first.ids
    assert again.ids == first.ids
    assert turn.ids == fresh.ids
    assert np.allclose(turn.logprobs, fresh.logprobs, atol=FLOOR)
    if kind != "gemma3":  # a sliding window: a prefix is reused as a whole only
        assert again.stats.cached_tokens == again.stats.prompt_tokens - 1
        assert turn.stats.cached_tokens > first.stats.prompt_tokens - 1
        picture_begins = 80 if kind == "idefics3" else 30
        assert 0 < strange.stats.cached_tokens < first.stats.prompt_tokens - picture_begins + 20


@pytest.mark.parametrize("kind", KINDS)
async def test_a_conversation_with_pictures_goes_on_in_the_next_process(
    folder: Path, kind: Kind, tmp_path: Path
) -> None:
    model, words = folder / kind / f"tiny-{kind}.gguf", "a long story about the garden and the house " * 12
    question = asking(words, picture(), words)
    async with seeing(model, tmp_path) as before:
        first = await before.ask(question)
    async with seeing(model, tmp_path) as after:
        more = [question, {"role": "assistant", "content": first.text}, asking("What else?")]
        second = await after.ask(*more)
        other = await after.ask(asking(words, picture(seed=4), words))
    async with seeing(model) as fresh:
        assert (await fresh.ask(*more)).ids == second.ids
        assert (await fresh.ask(asking(words, picture(seed=4), words))).ids == other.ids
    least = 1 if kind == "gemma3" else first.stats.prompt_tokens - 1  # a sliding window is kept where it was saved
    assert second.stats.cached_tokens >= least


@pytest.mark.parametrize("kind", KINDS)
async def test_pictures_and_texts_run_beside_each_other(folder: Path, kind: Kind) -> None:
    questions = [
        asking("What is ", picture(), "?"),
        asking("Tell me of the garden and the house"),
        asking(picture(seed=3), "and", picture(seed=4)),
    ]
    async with seeing(folder / kind / f"tiny-{kind}.gguf", spec="off") as model:
        alone = [await model.ask(question, max_tokens=24) for question in questions]
        together = await asyncio.gather(*(model.ask(question, max_tokens=24) for question in questions))
    for one, other in zip(alone, together, strict=True):
        differs = (token != twin for token, twin in zip(one.ids, other.ids, strict=True))
        same = next((index for index, is_other in enumerate(differs) if is_other), len(one.ids))
        # A batch of another shape may tip a near tie.
        assert np.allclose(one.logprobs[:same], other.logprobs[:same], atol=FLOOR)
        assert same == len(one.ids) or abs(one.logprobs[same] - other.logprobs[same]) < FLOOR


async def test_penalties_and_drafts_pass_over_pictures(folder: Path, places: Places) -> None:
    async with seeing(folder / "qwen3vl" / "tiny-qwen3vl.gguf", places=places) as model:
        question = asking("the house the house the house ", picture(), " the house the house ", picture())
        answer = await model.ask(question, max_tokens=40, repetition_penalty=1.2, num_logprobs=None)
        assert await model.ask(question, max_tokens=40, repetition_penalty=1.2, num_logprobs=None, draft="off")
        plain = await model.ask(question, max_tokens=40, draft="off")
        drafted = await model.ask(question, max_tokens=40)
    assert len(answer.ids) <= 40
    assert drafted.ids == plain.ids
    assert drafted.stats.drafted


@pytest.mark.parametrize("draft", ["ngram", "mtp"])
async def test_a_hybrid_drafts_after_pictures(
    tmp_path: Path, places: Places, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between pictures, behind the last, and beside others: the answers are those without drafts."""
    monkeypatch.setattr(MtpDrafter, "_step_cost", lambda _: 0.01)  # of a tiny model, the heads are as slow as a step
    monkeypatch.setattr(throttle, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(StepClock, "observe", lambda *_: None)  # nor does a busy machine end its drafts
    path, _ = write_pair(tmp_path, "qwen35")
    words = "the house the house the house"
    questions = [
        asking(words, picture(), words, picture(seed=seed), words, "and the garden" * seed) for seed in range(4)
    ]
    async with seeing(path, draft="off", prefix_cache_ram=0.0) as model:
        plain = [await model.ask(question, max_tokens=40) for question in questions]
    async with seeing(path, places=places, draft=draft) as model:
        drafted = [await model.ask(question, max_tokens=40) for question in questions]
        more = [questions[0], {"role": "assistant", "content": drafted[0].text}, asking("What else? ", picture(seed=9))]
        turn = await model.ask(*more, max_tokens=40)
        together = await asyncio.gather(*(model.ask(question, max_tokens=40) for question in questions))
    async with seeing(path, draft="off", prefix_cache_ram=0.0) as model:
        assert (await model.ask(*more, max_tokens=40)).ids == turn.ids
    assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
    assert [answer.ids for answer in together] == [answer.ids for answer in plain]
    assert sum(answer.stats.accepted for answer in drafted) > 10


async def test_one_model_that_does_not_see_names_those_that_do(tmp_path: Path) -> None:
    async with seeing(write_tiny(tmp_path / "blind.gguf", chat_template="{{ messages[0].content }}")) as model:
        with pytest.raises(NotSeenError, match="reads no images"):
            await model.ask(asking(picture()))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/cat.png", "nothing is fetched from"),
        ("file:///etc/passwd", "nothing is fetched for a client"),
        ("data:image/png;base64,AAA", "base64 of a picture is damaged"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "picture"),
        ("data:,x", "nothing is fetched"),
    ],
)
async def test_what_is_no_picture_is_refused_in_one_line(folder: Path, url: str, message: str) -> None:
    async with seeing(folder / "gemma3" / "tiny-gemma3.gguf") as model:
        with pytest.raises(RequestError, match=message):
            await model.ask(asking(picture_part(url)))
        assert (await model.ask(asking("still here ", picture()))).ids


async def test_no_text_of_a_client_shows_a_picture(folder: Path) -> None:
    """The mark of a picture is a character that no text of the request has."""
    forged = "".join(map(chr, range(0x30000, 0x30010)))
    async with seeing(folder / "qwen3vl" / "tiny-qwen3vl.gguf") as model:
        prepared = await model.answerer.prepare(AnswerRequest(messages=[asking(forged, picture(), forged)]))
    assert len(prepared.pictures) == 1


async def test_a_prompt_with_a_picture_that_does_not_fit_is_refused(folder: Path) -> None:
    async with seeing(folder / "qwen3vl" / "tiny-qwen3vl.gguf") as model:
        with pytest.raises(EdgeLMError, match=r"the context holds 1,024"):
            await model.ask(asking(picture(2000, 2000)))
        assert (await model.ask(asking(picture()))).ids


def test_a_projector_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "wide.gguf", width=128)
    with pytest.raises(ModelError, match="projector"):
        build(
            EngineJob(
                model=model, settings=Settings(ctx=512, mmproj=str(folder / "gemma3" / "mmproj-tiny-gemma3.gguf"))
            )
        )
