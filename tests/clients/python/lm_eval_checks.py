"""lm-evaluation-harness: its models for completions and for chats, on one task of each kind.

The next token of the clients' model depends on the last one alone. So the log-probability of a text is the sum of those
of its pairs of tokens, each of which a request of its own tells.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import requests
from checks import ADDRESS, MODEL, check, main
from lm_eval import simple_evaluate
from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

COMPLETIONS, CHAT = f"{ADDRESS}/v1/completions", f"{ADDRESS}/v1/chat/completions"
CHOICES = ["and the dog", "a big tree", "hello world"]  # behind the last one, the model ends
DOCUMENTS: list[dict[str, Any]] = [
    {"question": "the little girl", "choices": CHOICES, "answer": 0},
    {"question": "once upon a time the cat and dog", "choices": CHOICES, "answer": 2},
    {"question": "he said that", "choices": CHOICES[::-1], "answer": 1},
]
END = "<|im_end|>"
folder = tempfile.TemporaryDirectory()
data = Path(folder.name) / "data.json"
data.write_text(json.dumps(DOCUMENTS))
TASK = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
CHOICE = TASK | {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
ROLLING = TASK | {
    "task": "rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
}
WRITE = TASK | {
    "task": "write",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "temperature": 0, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def evaluated(task: dict[str, Any], model: str = "local-completions", **options: Any) -> list[Any]:
    """Return the answers to the requests of a task, in the order of its documents."""
    url = CHAT if "chat" in model else COMPLETIONS
    arguments = {"model": MODEL, "base_url": url, "max_retries": 1, **options.pop("model_args", {})}
    result = simple_evaluate(model, model_args=arguments, tasks=[task], bootstrap_iters=0, **options)
    samples = sorted(result["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def tokens(text: str) -> list[int]:
    asked = {"prompt": text, "add_special_tokens": False}
    ids: list[int] = requests.post(f"{ADDRESS}/tokenize", json=asked, timeout=60).json()["tokens"]
    return ids


@cache
def pair_logprob(first: int, second: int) -> tuple[float, bool]:
    """Return the log-probability of a token behind another, and whether it is the likeliest."""
    asked = {"model": MODEL, "prompt": [first, second], "echo": True, "max_tokens": 0, "logprobs": 1}
    logprobs = requests.post(COMPLETIONS, json=asked, timeout=60).json()["choices"][0]["logprobs"]
    value = logprobs["token_logprobs"][1]
    return value, value == max(logprobs["top_logprobs"][1].values())


def expected(ids: list[int], begin: int) -> tuple[float, bool]:
    """Return the sum for the tokens from one on, and whether each is the likeliest."""
    pairs = [pair_logprob(*pair) for pair in pairwise(ids[begin - 1 :])]
    return sum(value for value, _ in pairs), all(likeliest for _, likeliest in pairs)


def compare_choices(found: list[Any]) -> None:
    assert len(found) == len(DOCUMENTS)
    for document, answers in zip(DOCUMENTS, found, strict=True):
        question = document["question"]
        for choice, ((value, likeliest),) in zip(document["choices"], answers, strict=True):
            wanted, greedy = expected(tokens(f"{question} {choice}"), len(tokens(question)))
            assert math.isclose(float(value), wanted, abs_tol=1e-3), (question, choice, value, wanted)
            assert (str(likeliest) == "True") == greedy, (question, choice)


@check
def the_tokenizer_is_the_servers() -> None:
    assert check_remote_tokenizer_support(COMPLETIONS)
    tokenizer = RemoteTokenizer(COMPLETIONS)
    ids = tokenizer.encode("the little girl")
    assert tokenizer.decode(ids).strip() == "the little girl"
    assert tokenizer.eos_token == END
    assert tokenizer.decode([tokenizer.eos_token_id]) == END
    assert "assistant" in str(tokenizer.tokenizer_info["chat_template"])


@check
def choices_by_tokens() -> None:
    compare_choices(evaluated(CHOICE))


@check
def choices_by_text() -> None:
    compare_choices(evaluated(CHOICE, model_args={"tokenized_requests": False}))


@check
def choices_in_batches() -> None:
    compare_choices(evaluated(CHOICE, batch_size=4))


@check
def choices_at_the_same_time() -> None:
    compare_choices(evaluated(CHOICE, model_args={"num_concurrent": 4}))


@check
def perplexity() -> None:
    """The first token is counted behind the token that begins a text, or behind the one that ends it."""
    tokenizer = RemoteTokenizer(COMPLETIONS)
    begin = tokenizer.bos_token_id or tokenizer.eos_token_id
    for document, ((value,),) in zip(DOCUMENTS, evaluated(ROLLING), strict=True):
        wanted, _ = expected([begin, *tokens(document["question"])], 1)
        assert math.isclose(float(value[0] if isinstance(value, list) else value), wanted, abs_tol=1e-3)


@check
def answers_are_those_of_the_endpoint() -> None:
    for document, ((text,),) in zip(DOCUMENTS, evaluated(WRITE), strict=True):
        asked = {"model": MODEL, "prompt": document["question"], "max_tokens": 6, "temperature": 0, "stop": ["\n"]}
        assert text == requests.post(COMPLETIONS, json=asked, timeout=60).json()["choices"][0]["text"]


@check
def chat() -> None:
    found = evaluated(WRITE, "local-chat-completions", apply_chat_template=True)
    for document, ((text,),) in zip(DOCUMENTS, found, strict=True):
        messages = [{"role": "user", "content": document["question"]}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, "stop": ["\n"]}
        assert text == requests.post(CHAT, json=asked, timeout=60).json()["choices"][0]["message"]["content"]


if __name__ == "__main__":
    main("lm_eval")
