"""`--repeatable` on the torch engine, through the endpoint and in Triton's interpreter: equal bits, cold and cached."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from edgelm.backends.build import build
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.messages import EngineJob
from edgelm.kernels.matmul import ROWS
from edgelm.text.prompt_token_cache import PromptTokenCache
from tests.backends.torch.torch_engine import load_gguf, running
from tests.served import Served, served
from tests.tiny import write_tiny

SHAPE = {"layers": 1, "width": 32, "ffn": 32, "heads": 1, "kv_heads": 1, "head_dim": 32, "vocab_size": 272}
PROMPT_LEN = 36  # more than a block of the cache, which is what a second request finds there


async def numbers(model: Served, prompt: list[int], *, repeatable: bool) -> list[float]:
    """Return the log-probabilities of an answer's tokens."""
    body = {"repeatable": True} if repeatable else {}
    answer = await model.client.completions.create(
        model="m", prompt=prompt, max_tokens=2, temperature=0, logprobs=1, extra_body=body
    )
    assert answer.choices[0].logprobs
    return list(answer.choices[0].logprobs.token_logprobs or ())


# Attention writes nothing to rows of padding, so later matmuls read whatever was there: the interpreter warns.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("repeatable", [True, False])
async def test_answers_are_equal_to_the_bit(repeatable: bool, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="q4_0", endless=True, **SHAPE)
    decoder = load_gguf(path, "triton", torch.bfloat16)
    rng = random.Random(1)
    prompt, other = ([rng.randrange(3, 260) for _ in range(length)] for length in (PROMPT_LEN, 5))
    options = {"context": 64, "capacity": 128, "max_sequences": 2, "max_tokens": ROWS}
    with running(decoder, repeatable=repeatable, **options) as engine:
        loaded = LoadedModel("m", engine, LlamaTokenizer.from_file(path), PromptTokenCache())
        async with served(loaded) as model:
            cold = await numbers(model, prompt, repeatable=repeatable)
            assert await numbers(model, prompt, repeatable=repeatable) == cold or not repeatable, "cached"
            asked = (numbers(model, text, repeatable=repeatable) for text in (other, prompt))
            beside = (await asyncio.gather(*asked))[1]
    assert (beside == cold) == repeatable


def test_plain_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EdgeLMError, match="repeatable with CUDA only"):
        build(
            EngineJob(
                model=write_tiny(tmp_path / "m.gguf"), settings=Settings(engine="torch", device="cpu", repeatable=True)
            )
        )
