"""A small vocabulary for grammars: all bytes, some pieces of JSON, and marks as text or as control tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec
from edgelm.engine.sampling.grammar_worker import check_grammar
from edgelm.jobs.tool_schemas import ToolSchemas
from edgelm.text import constraint
from edgelm.text.calls.format import CallFormat

PIECES = (
    '{"name": "', '", "arguments": ', '", "parameters": ', "</", "\n\n", '"}', '": ', ', "', " text", "ab", "12", ">\n",
)  # fmt: skip


class Vocabulary:
    """Tokens 0 to 255 are bytes, then come pieces, then marks, then the end of an answer."""

    def __init__(self, control: Sequence[str] = (), user_defined: Sequence[str] = ()) -> None:
        words = [piece.encode() for piece in (*PIECES, *user_defined)]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *words, *(text.encode() for text in control), b"<end>"]
        self.marks = {text: len(self.tokens) - 1 - len(control) + index for index, text in enumerate(control)}
        self.eos = len(self.tokens) - 1
        self.special_token_ids = [*self.marks.values(), self.eos]
        self.eos_token_id = self.eos
        self.bos_token_id = None
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=[self.eos])

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return list(data)

    def piece(self, token: int) -> bytes:
        return b"" if token in self.special_token_ids else self.tokens[token]

    def matcher(self, source: str) -> Any:
        matcher = llguidance.LLMatcher(self.tokenizer, llguidance.LLMatcher.grammar_from_lark(source), log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{source}"
        return matcher


class RealVocabulary:
    """The vocabulary of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = LlamaTokenizer.from_file(path)
        size = self._tokenizer.num_tokens
        self.tokens = [self._tokenizer.piece(token) for token in range(size)]
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if not piece]
        self.eos_token_id = self._tokenizer.eos_id
        self.bos_token_id = None
        wrapper = llguidance.TokenizerWrapper(self)
        self.tokenizer = llguidance.LLTokenizer(wrapper, eos_token=sorted(self._tokenizer.stop_ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text inside an answer, where SPM vocabularies add no space."""
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        before = self._tokenizer.encode("\x02", special=False, bos=False)
        return self._tokenizer.encode("\x02" + plain, special=False, bos=False)[len(before) :]

    def matcher(self, source: str) -> Any:
        matcher = llguidance.LLMatcher(self.tokenizer, llguidance.LLMatcher.grammar_from_lark(source), log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{source}"
        return matcher


def check(source: str) -> str | None:
    """Return why llguidance refuses a grammar."""
    error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        llguidance.LLMatcher.grammar_from_lark(source)
    )
    return str(messages[0]) if error else None


def answer_grammar(
    form: CallFormat | None, tools: Sequence[Mapping[str, Any]], **options: Any
) -> constraint.Constraint | None:
    """Return the grammar of an answer, with the schemas of the tools checked in this process."""

    async def checked(spec: GrammarSpec) -> CheckedGrammar:
        return check_grammar(spec)

    functions = [tool.get("function", tool) for tool in tools]
    schemas = asyncio.run(ToolSchemas(checked).of(functions))
    return constraint.answer_grammar(form, tools, schemas=schemas, **options)


def walk(
    vocabulary: Vocabulary, source: str, rng: random.Random, most: int, weigh: Callable[[int], float] | None = None
) -> tuple[list[int], bool]:
    """Return random tokens that a grammar allows, and whether it let the answer end."""
    matcher = vocabulary.matcher(source)
    size = len(vocabulary.tokens)
    mask = np.zeros((size + 31) // 32, dtype=np.int32)
    tokens: list[int] = []
    for _ in range(most):
        if matcher.is_stopped():
            return tokens, True
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist()
        assert not matcher.is_error(), matcher.get_error()
        assert allowed, tokens
        weights = [weigh(token) if weigh else 1.0 for token in allowed]
        token = rng.choices(allowed, weights)[0]
        if token == vocabulary.eos:
            return tokens, True
        assert matcher.consume_token(token), (matcher.get_error(), tokens)
        tokens.append(token)
    return tokens, bool(matcher.is_accepting())
