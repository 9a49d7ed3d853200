"""The job of `edgelm run`: answer one prompt with a loaded model.

Owns the document that `--json` prints. Knows nothing of terminals and flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from edgelm.backends.model import LoadedModel
from edgelm.base.errors import RequestError
from edgelm.base.passages import Passage
from edgelm.base.workers.child import Child
from edgelm.base.workers.messages import Read, Result, RunJob, Said, Text, Thought
from edgelm.base.workers.parent import Worker
from edgelm.chats.knowledge.quote import fitting, share_of_context, system_message
from edgelm.engine.core import Stats
from edgelm.jobs.answer import Answerer
from edgelm.jobs.prompts import prompt_ids
from edgelm.jobs.request import AnswerRequest, thinking_kwargs
from edgelm.text.encoding import TextEncoder
from edgelm.text.template_runner import TemplateRunner

MAX_TOKEN_LEN = 128  # characters: the longest token of the known vocabularies


async def answer_prompt(template_worker: Worker | None, loaded: LoadedModel, job: RunJob, child: Child) -> None:
    """Send the answer to the prompt of a job in pieces, and then its document. Raises EdgeLMError.

    `template_worker` is for the chat template; it is closed at the end.
    """
    grammars = None
    if job.grammar:
        from edgelm.engine.sampling.grammar import GrammarCompiler  # most answers need no llguidance

        grammars = GrammarCompiler(loaded.tokenizer, loaded.engine.info.num_vocab)
    is_chat = not job.raw and (loaded.tokenizer.chat_template is not None or bool(job.before or job.images))
    templates = TemplateRunner(loaded.tokenizer, worker=template_worker)
    if not is_chat:
        await templates.close()
    answerer = Answerer(loaded, templates, grammars, job.settings)
    text, reasoning, ids = "", "", list[int]()
    try:
        _check_text_size(sum(len(said.text) for said in job.before) + len(job.prompt), loaded.engine.info.context)
        if grammars and job.grammar and job.grammar_file:
            try:
                await grammars.check(job.grammar)
            except RequestError as error:
                raise RequestError(f"{job.grammar_file}: {error.message}", "correct the file") from None
        passages = _fitting(loaded, job.passages or ())
        if job.passages is not None:
            child.send(Read(tuple(passages)))
        request = _chat_request(job, passages) if is_chat else _text_request(loaded, job, passages)
        prepared = await answerer.prepare(request)
        async with aclosing(answerer.answer(prepared)) as deltas:
            async for delta in deltas:
                if delta.reasoning:
                    child.send(Thought(delta.reasoning))
                if delta.text:
                    child.send(Text(delta.text))
                reasoning += delta.reasoning
                text += delta.text
                ids += [sample.id for sample in delta.sampled]
                if delta.stats:
                    thought = {"reasoning": reasoning} if reasoning else {}
                    answer = {"text": text, **thought, "token_ids": ids, "finish_reason": delta.reason}
                    read = {} if job.passages is None else {"passages": [_document(passage) for passage in passages]}
                    child.send(Result({"model": loaded.name, **answer, **read, **_measured(delta.stats)}))
    finally:
        await templates.close()
        if grammars:
            await grammars.close()


def _fitting(loaded: LoadedModel, passages: Sequence[Passage]) -> list[Passage]:
    """Return the best passages that fit the model's context: by characters, and no more tokens than half of it."""
    context = loaded.engine.info.context
    chosen = fitting(passages, share_of_context(context))
    texts = TextEncoder(loaded.tokenizer, unknown=True)
    while chosen and sum(map(len, texts.plain(system_message(chosen)))) > context // 2:
        chosen.pop()
    return chosen


def _document(passage: Passage) -> dict[str, str]:
    return {"name": passage.name, **asdict(passage)}


def _text_request(loaded: LoadedModel, job: RunJob, passages: Sequence[Passage]) -> AnswerRequest:
    systems = [said.text for said in job.before if said.role == "system"]
    text = "\n\n".join(filter(None, (*systems, system_message(passages), job.prompt)))
    pieces = TextEncoder(loaded.tokenizer).prompt(text, special=False)
    ids = prompt_ids(pieces, loaded.engine.info.context)
    return AnswerRequest(prompt=ids, grammar=job.grammar, stop=job.stop)


def _chat_request(job: RunJob, passages: Sequence[Passage]) -> AnswerRequest:
    effort = None if job.think == "auto" else job.think
    read = [{"role": "system", "content": system_message(passages)}] if passages else []
    return AnswerRequest(
        messages=[*map(_message, job.before), *read, {"role": "user", "content": _content(job.prompt, job.images)}],
        grammar=job.grammar,
        template_kwargs=thinking_kwargs(effort, None),
        stop=job.stop,
    )


def _message(said: Said) -> dict[str, Any]:
    reasoning = {"reasoning_content": said.reasoning} if said.reasoning else {}
    return {"role": said.role, "content": _content(said.text, said.images), **reasoning}


def _content(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the content of a message: parts in OpenAI's form where it has pictures."""
    if not images:
        return text
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return [*parts, {"type": "text", "text": text}]


def _measured(stats: Stats) -> dict[str, Any]:
    return {
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "completion_tokens": stats.completion_tokens,
        },
        "timings": {
            "queue_ms": round(stats.queue_ms, 3),
            "prompt_ms": round(stats.prompt_ms, 3),
            "first_token_ms": round(stats.first_token_ms, 3),
            "decode_ms": round(stats.decode_ms, 3),
            "decode_tokens_per_second": round(stats.decode_tokens_per_second, 2),
        },
        "speculation": {"drafted": stats.drafted, "accepted": stats.accepted},
    }


def _check_text_size(num_chars: int, context: int) -> None:
    """Raise RequestError for a text that is too long for a context: llama.cpp may tokenize megabytes for minutes."""
    if num_chars > MAX_TOKEN_LEN * context:
        raise RequestError(
            f"the prompt has {num_chars:,} characters, a context of {context:,} tokens holds at most "
            f"{MAX_TOKEN_LEN * context:,}",
            "shorten it, or raise --ctx",
        )
