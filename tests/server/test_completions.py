"""/v1/completions as OpenAI's client meets it, with a real tiny model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from edgelm.backends.llama.binding import L
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.model import LoadedModel
from edgelm.base.errors import RequestError
from edgelm.engine.core import Sampled
from edgelm.server.api.completions import MAX_ANSWERS, MAX_PROMPTS
from edgelm.server.api.dialects import parse_request
from edgelm.server.api.errors import ApiError
from edgelm.server.api.logprobs import TextOffsets, completion_logprobs
from edgelm.server.keys import USAGE
from edgelm.text.encoding import TextEncoder
from edgelm.text.fim import fim_tokens
from tests.bare import BareLoop
from tests.engine.fake import SimpleDrafter
from tests.served import Served, loaded_model, served
from tests.tiny import BOS, EOS, FIRST_PIECE, write_tiny

PROMPT = "once upon a time"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", context=512, endless=True)


class Quiet(SimpleDrafter):
    """Drafts nothing: only known tokens are drafted."""

    def propose(self, seq: Any, marginal_cost: Any, forced: Any = ()) -> list[int]:
        return []


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[LoadedModel]:
    with loaded_model(path, Quiet(), context=512) as loaded:
        yield loaded


@pytest.fixture
async def edgelm(model: LoadedModel) -> AsyncIterator[Served]:
    async with served(model) as made:
        yield made


def create(edgelm: Served, **fields: Any) -> Any:
    return edgelm.client.completions.create(
        **{"model": "m", "prompt": PROMPT, "max_tokens": 6, "temperature": 0} | fields
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def plain_logprobs(path: Path, ids: list[int]) -> list[NDArray[np.float64]]:
    """Return the log-probabilities behind each token, from llama.cpp one token at a time."""
    model = LlamaModel(path)
    loop = BareLoop(model.native, 512, kv="int8", flash=True, threads=1)
    rows = []
    for position, token in enumerate(ids):
        loop.decode([token], position)
        rows.append(log_softmax(np.ctypeslib.as_array(L.llama_get_logits(loop.context), (loop.num_vocab,)).copy()))
    loop.close()
    return rows


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_echo_has_the_models_own_log_probabilities(edgelm: Served, path: Path, max_tokens: int) -> None:
    tokenizer = edgelm.loaded.tokenizer
    ids = tokenizer.encode(PROMPT, special=True, bos=True)
    answer = await create(edgelm, echo=True, logprobs=3, max_tokens=max_tokens)
    (choice,) = answer.choices
    assert choice.text.startswith(PROMPT)
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == max_tokens
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(ids) + max_tokens
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    rows = plain_logprobs(path, ids)
    for index in range(1, len(ids)):
        row = rows[index - 1]
        assert logprobs.token_logprobs[index] == pytest.approx(row[ids[index]], abs=1e-3)
        top = logprobs.top_logprobs[index]
        assert top[logprobs.tokens[index]] == logprobs.token_logprobs[index], "the token itself is always there"
        best = sorted(top.values(), reverse=True)
        assert len(best) <= 4
        assert best[:3] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-3)
    # The first token is the BOS, which is no text; the first word of the vocabulary begins with a space.
    assert "".join(logprobs.tokens[1 : len(ids)]).removeprefix(" ") == PROMPT
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[2 : len(ids)]:
        assert choice.text[offset : offset + len(token)] == token


async def test_twenty_log_probabilities_of_each_token(edgelm: Served) -> None:
    answer = await create(edgelm, echo=True, logprobs=20, temperature=2.0, seed=4, prompt=["once upon", "日本 é"])
    for choice in answer.choices:
        logprobs = choice.logprobs
        for token, value, top in list(
            zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
        )[1:]:
            assert len(top) <= 21
            assert top[token] >= value, "it is greater for a byte whose letter is a token, too"
            assert top[token] == value or len(token) == 1
    assert sum(len(top) == 21 for choice in answer.choices for top in choice.logprobs.top_logprobs[1:]) > 0


async def test_the_ends_of_turns_are_tokens_like_others(tmp_path: Path) -> None:
    """Programs count the tokens: those that end an answer stand in a prompt too, and end the answer of one token."""
    path = write_tiny(tmp_path / "ends.gguf", context=512, script=(FIRST_PIECE + 30, FIRST_PIECE + 31, EOS))
    with loaded_model(path, Quiet(), context=512) as loaded:
        async with served(loaded) as edgelm:
            ids = [BOS, EOS, FIRST_PIECE + 40, EOS, FIRST_PIECE + 31]
            answer = await create(edgelm, prompt=[ids, ids[:3]], echo=True, logprobs=1, max_tokens=1)
            ended, other = answer.choices
            assert ended.finish_reason == "stop"
            assert ended.logprobs.tokens[1:5:2] == ["</s>"] * 2
            assert len(ended.logprobs.token_logprobs) == len(ids) + 1, "the harness drops the last one unseen"
            assert ended.logprobs.tokens[-1] == "</s>"
            assert ended.logprobs.text_offset[-1] == len(ended.text)
            assert len(other.logprobs.token_logprobs) == 4
            parts = [
                chunk.choices[0].logprobs.tokens
                async for chunk in await create(edgelm, prompt=ids, echo=True, logprobs=1, max_tokens=1, stream=True)
                if chunk.choices and chunk.choices[0].logprobs
            ]
            assert [token for tokens in parts for token in tokens] == ended.logprobs.tokens


async def test_echo_of_ids_and_of_several_choices(edgelm: Served) -> None:
    ids = edgelm.loaded.tokenizer.encode(PROMPT, special=True, bos=True)
    by_ids = await create(edgelm, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    by_text = await create(edgelm, echo=True, logprobs=0, max_tokens=0)
    assert by_ids.choices == by_text.choices
    several = await create(edgelm, echo=True, n=4, temperature=1, logprobs=0)
    assert all(choice.text.startswith(PROMPT) and len(choice.text) > len(PROMPT) for choice in several.choices)
    assert len({choice.text for choice in several.choices}) > 1
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        await create(edgelm, prompt=[10**6], echo=True, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        await create(edgelm, prompt=[-1], echo=True, max_tokens=0)


@pytest.mark.parametrize("max_tokens", [0, 1])  # lm-eval sends both
@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"logprobs": 1, "prompt": [FIRST_PIECE]}, {}])
async def test_the_log_and_the_metrics_count_an_echo_as_its_prompt(
    edgelm: Served, max_tokens: int, fields: dict[str, Any]
) -> None:
    def counted() -> Counter[str]:
        return Counter(edgelm.loaded.engine.counters.copy()["counts"])

    before = counted()
    answer = await create(edgelm, echo=True, max_tokens=max_tokens, extra_headers={USAGE: "echo"}, **fields)
    usage = (await edgelm.client.get("http://edgelm/usage/echo", cast_to=httpx2.Response)).json()
    num_prompt = answer.usage.prompt_tokens
    assert (usage["prompt_tokens"], usage["generated_tokens"], usage["finish_reason"]) == (
        num_prompt,
        max_tokens,
        "length",
    )
    new = counted() - before
    ran = max_tokens > 0 or ("logprobs" in fields and num_prompt > 1)
    assert new["prompt_tokens_total"] == (num_prompt if ran else 0)
    assert new["generation_tokens_total"] == max_tokens


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_without_a_token_each_choice_ends_all_the_same(edgelm: Served, prompt: Any) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 0, "n": 2}
    whole = await create(edgelm, **fields)
    num_choices = 4 if isinstance(prompt, list) else 2
    assert [(choice.index, choice.text, choice.finish_reason) for choice in whole.choices] == [
        (index, "", "length") for index in range(num_choices)
    ]
    assert whole.usage.completion_tokens == 0
    assert whole.usage.prompt_tokens == (await create(edgelm, **fields | {"n": 1})).usage.prompt_tokens
    ends = [
        (choice.index, choice.finish_reason)
        async for chunk in await create(edgelm, **fields, stream=True)
        for choice in chunk.choices
        if choice.finish_reason
    ]
    assert sorted(ends) == [(index, "length") for index in range(num_choices)]


async def test_several_prompts_are_answered_at_the_same_time_and_in_order(edgelm: Served) -> None:
    prompts = ["the little girl", "a big dog", "he said"]
    alone = [(await create(edgelm, prompt=prompt)).choices[0].text for prompt in prompts]
    together = await create(edgelm, prompt=prompts)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == alone
    lengths = [len(edgelm.loaded.tokenizer.encode(prompt, special=True, bos=True)) for prompt in prompts]
    assert together.usage.prompt_tokens == sum(lengths)
    assert together.usage.completion_tokens == 18
    twice = await create(edgelm, prompt=prompts, n=2)
    assert [choice.index for choice in twice.choices] == list(range(6))
    assert [choice.text for choice in twice.choices[::2]] == alone
    assert (twice.usage.prompt_tokens, twice.usage.completion_tokens) == (sum(lengths), 36)
    running = asyncio.create_task(create(edgelm, prompt=prompts, max_tokens=300))
    while edgelm.loaded.engine.num_requests < 3:
        assert not running.done()
        await asyncio.sleep(0)
    await running


async def test_a_stream_has_the_same_text_and_counts(edgelm: Served) -> None:
    fields: dict[str, Any] = {"prompt": ["the cat", "a dog"], "n": 2, "temperature": 1, "seed": 5, "logprobs": 1}
    whole = await create(edgelm, **fields)
    texts, tokens, ends = [""] * 4, [[] for _ in range(4)], [""] * 4
    usage = None
    async for chunk in await create(edgelm, **fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [
        list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)) for choice in whole.choices
    ]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


async def test_best_of_returns_the_most_likely(edgelm: Served) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 0}
    every = await create(edgelm, **fields, n=4)
    means = [np.mean(choice.logprobs.token_logprobs) for choice in every.choices]
    best = await create(edgelm, **fields, n=2, best_of=4)
    expected = sorted(every.choices, key=lambda choice: -means[choice.index])[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == 24


async def test_suffix_without_marks_and_other_refusals(edgelm: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="filling in"):
        await create(edgelm, suffix="b")
    for fields in ({"prompt": ""}, {"prompt": []}, {"prompt": [[]]}):
        try:
            await create(edgelm, **fields)
        except openai.BadRequestError as error:
            assert "prompt" in str(error)  # noqa: PT017  a vocabulary with a BOS answers the empty text
    with pytest.raises(openai.BadRequestError) as caught:
        await create(edgelm, prompt="hello " * 2000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    clamped = await create(edgelm, max_tokens=10**6)
    assert clamped.choices[0].finish_reason == "length"
    assert clamped.usage.total_tokens == 512


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"echo": True, "suffix": "x"}, "suffix"),
        ({"prompt": ["x"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": ["x"] * MAX_PROMPTS, "n": 2}, "n"),
        ({"prompt": ["x"] * 33, "n": 1, "best_of": 2}, "best_of"),
        ({"prompt": [1, "x"]}, "prompt.1"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": {}}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_refused_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request("/v1/completions", {"model": "m", "prompt": "x"} | fields)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


def test_the_greatest_number_of_answers() -> None:
    body = {"model": "m", "prompt": ["x"] * (MAX_ANSWERS // 8), "n": 8}
    requests = parse_request("/v1/completions", body).answer_requests()
    assert sum(request.num_choices for request in requests) == MAX_ANSWERS


def test_sixteen_tokens_are_openais_default() -> None:
    (request,) = parse_request("/v1/completions", {"model": "m", "prompt": "x"}).answer_requests()
    assert request.sampling == {"max_tokens": 16}


class MarkedTokenizer:
    """A vocabulary of letters, with control tokens of some family."""

    bos_id = BOS

    def __init__(self, *marks: str) -> None:
        self.marks = {mark: 1000 + index for index, mark in enumerate(marks)}
        self.special_strings = frozenset(self.marks)

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        ids = [self.marks[text]] if special and text in self.marks else [ord(letter) for letter in text]
        return [BOS] * bos + ids


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), [BOS, 1000, 97, 1001, 98, 1002]),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), [BOS, 1000, 97, 1001, 98, 1002]),
        (("[SUFFIX]", "[PREFIX]"), [BOS, 1000, 98, 1001, 97]),
    ],
)
def test_the_marks_of_each_family(marks: tuple[str, ...], expected: list[int]) -> None:
    def tokens(prefix: str, *marks: str) -> list[int]:
        tokenizer: Any = MarkedTokenizer(*marks)
        return [token for piece in fim_tokens(TextEncoder(tokenizer), prefix, "b") for token in piece]

    assert tokens("a", *marks) == expected
    injected = tokens(marks[0], *marks)
    assert 1000 not in injected[2 if marks[0] != "[SUFFIX]" else 3 :], "a text's own marks are letters"
    with pytest.raises(RequestError, match="filling in"):
        tokens("a", *marks[:1])


class Pieces:
    """A vocabulary of a few pieces; one without bytes is a control token."""

    stop_ids = frozenset({0})

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def text_of(self, token: int) -> str:
        return f"<{token}>"


def test_offsets_count_characters_and_not_tokens() -> None:
    tokenizer: Any = Pieces(b"", b"a", b"\xe6", b"\x97\xa5", b"b")
    offsets = TextOffsets(tokenizer)
    sampled = [Sampled(1), *(Sampled(token, -1.0) for token in (2, 3, 4, 0))]
    logprobs = completion_logprobs(tokenizer, sampled, [offsets.next(sample.id) for sample in sampled])
    assert logprobs["tokens"] == ["a", "bytes:\\xe6", "bytes:\\x97\\xa5", "b", "<0>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("text", "ids", "starts", "behind"),
    [
        ("a日b", [0, 1, 2, 3, 4], [0, 0, 1, 1, 2], 3),  # a token before the text that it does not show
        ("<0>a<5>b", [0, 1, 5, 4], [0, 3, 4, 7], 8),  # control tokens that the text spells
        ("a<0> a", [6, 0, 6, 6], [0, 1, 4, 6], 6),  # spaces that the vocabulary adds; one that it does not
        ("a\ufffd", [1, 2], [0, 1], 2),  # half a character, which the answer does not complete
        ("", [0], [0], 0),
    ],
)
def test_offsets_of_a_prompt_are_those_in_its_text(text: str, ids: list[int], starts: list[int], behind: int) -> None:
    tokenizer: Any = Pieces(b"", b"a", b"\xe6", b"\x97\xa5", b"b", b"", b" a")
    offsets = TextOffsets(tokenizer)
    assert offsets.of_prompt(text, ids) == starts
    assert [offsets.next(3), offsets.next(4)] == [behind, behind + 2]


def test_of_two_tokens_with_the_same_text_the_likelier_is_shown() -> None:
    tokenizer: Any = Pieces(b"a", b"b", b"a")
    sample = Sampled(2, -3.0, ((0, -1.0), (1, -2.0)))
    assert completion_logprobs(tokenizer, [sample], [0])["top_logprobs"] == [{"a": -1.0, "b": -2.0}]
