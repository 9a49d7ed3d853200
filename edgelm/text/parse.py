"""AnswerParser: the tokens of an answer to reasoning, content and tool calls, as they come.

It takes the place of TextStream for chat answers: it decodes UTF-8, finds the marks, and applies stop strings to the
content. One parser serves one answer:

    parser = AnswerParser(format, reasoning, prefill, tools, marks=marks, stop=stop)
    for sample in event.sampled:                        # the stop token too: it is a mark or nothing
        parts = parser.push(sample.id, tokenizer.piece(sample.id), drafted=index < accepted)
        if parser.stopped: break                        # a stop string: cancel the sequence, finish with "stop"
    parts += parser.flush(event.finish_reason)          # once, at the end, with the engine's reason
    reason = parser.finish_reason(event.finish_reason)  # "tool_calls" if all calls are complete

`prefill` is the rendered prompt, or its end: it tells whether the answer begins inside reasoning or a call. `marks` are
the control tokens that the formats need (`control_marks`). Without format and reasoning the parser is a TextStream.

A text may begin like a mark. It is held back until that is decided, and nothing is read twice. The parts do not depend
on how the text is cut into tokens. White space beside marks belongs to nobody; all other text is in a part, except the
beginning of a call's marks where a limit cuts the answer.

Owns the order of reasoning, content and calls. What stands inside a call is in calls/bodies.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgelm.text.calls.format import CallFormat, heads_of, parts_of
from edgelm.text.calls.output import Args, CallBegin, CallEnd, Calls, Content, Output, Part, Reasoning
from edgelm.text.calls.reader import MARKS, Finder, Marks, Reader, Wait
from edgelm.text.calls.values import Tools
from edgelm.text.reasoning import ReasoningFormat, is_thinking

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

__all__ = ["AnswerParser", "Args", "CallBegin", "CallEnd", "Content", "Part", "Reasoning", "control_marks"]


def control_marks(tokenizer: Tokenizer, form: CallFormat | None, reasoning: ReasoningFormat | None) -> dict[str, int]:
    """Return the ids of the control tokens that stand in the strings of the formats."""
    strings = "\n".join((*(form.strings if form else ()), *(reasoning.strings if reasoning else ())))
    marks: dict[str, int] = {}
    for text in tokenizer.special_strings:
        if text and text in strings:
            ids = tokenizer.encode(text, special=True, bos=False)
            if len(ids) == 1 and not tokenizer.piece(ids[0]):
                marks[text] = ids[0]
    return marks


class AnswerParser:
    """Separates the reasoning, the content and the calls of one answer."""

    def __init__(
        self,
        form: CallFormat | None,
        reasoning: ReasoningFormat | None,
        prefill: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        marks: Mapping[str, int] | None = None,
        stop: Sequence[str] = (),
        new_id: Callable[[], str] | None = None,
        must_call: bool = False,
        may_call: bool = True,
    ) -> None:
        """`must_call`: the answer is nothing but calls. Without `may_call`, a message of Harmony to a tool is none."""
        self._marks = Marks(marks or {})
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reader = Reader()
        self._form = self._marks.compiled_format(form) if form else None
        compiled = self._marks.compiled
        self._reasoning = reasoning and ReasoningFormat(
            compiled(reasoning.opened), compiled(reasoning.closed), tuple(map(compiled, reasoning.drop))
        )
        self._out = Output(stop, holds_space=bool(form or reasoning))
        self._calls = Calls(self._out, Tools(tools), form.id_rule if form else "any", new_id)
        self._in_reasoning = is_thinking(reasoning, prefill)
        self._must_call = must_call
        self.reasoning_tokens = 0
        self._parser = self._run()
        if form and form.body == "harmony":
            from edgelm.text.calls.harmony import Harmony

            self._parser = Harmony(self._reader, self._marks, self._out, self._calls, may_call=may_call).run()
        elif self._form:
            self._begin_inside(self._marks.compiled(prefill.rstrip()))
        self._step()
        assert not self._out.parts, "a prompt is no part of the answer"

    @property
    def thinking(self) -> bool:
        """Whether the answer is inside reasoning now."""
        return self._out.kind == "reasoning"

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the content; nothing comes after it."""
        return self._out.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that ended the content."""
        return self._out.stop

    def push(self, token: int | None, piece: bytes | str, *, drafted: bool = False) -> list[Part]:
        """Take the next token, with the bytes that it adds to the text; return the parts that are decided now."""
        was_thinking = self.thinking
        mark = self._marks.of_token(token)
        if mark:
            text = self._decoder.decode(b"", final=True) + mark
        else:
            text = piece if isinstance(piece, str) else self._decoder.decode(piece)
        parts = self._take(text, drafted)
        self.reasoning_tokens += was_thinking or self.thinking
        return parts

    def flush(self, reason: str = "stop") -> list[Part]:
        """End the answer for the engine's reason; return the rest that was held back."""
        if self._reader.ended:
            return []
        text = self._decoder.decode(b"", final=True)
        self._calls.truncated = self._reader.is_cut = reason != "stop"
        self._reader.ended = True
        return self._take(text, False)

    def finish_reason(self, reason: str) -> str:
        """Return the reason that a client sees: "tool_calls" if the answer calls tools, completely."""
        if not self._calls.count or reason != "stop" or self.stopped:
            return reason
        return "length" if self._calls.is_cut else "tool_calls"

    def _take(self, text: str, drafted: bool) -> list[Part]:
        self._out.arrived(len(text), drafted)
        self._reader.add(text)
        self._step()
        if self._reader.ended:
            if self._must_call and self._out.blank:
                self._out.drop_space()
            self._out.end()
        return self._out.take()

    def _step(self) -> None:
        if not self._out.stopped:
            next(self._parser, None)

    # --------------------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[None, None, None]:
        """Read an answer."""
        reader, out = self._reader, self._out
        forms = [] if self._form is None else [self._form, *self._form.also]
        thoughts = self._reasoning
        drops = (*(self._form.drop if self._form else ()), *(thoughts.drop if thoughts else ()))
        heads = [parts[0] for form in forms for parts in heads_of(form)]
        opened, closed = (parts_of(thoughts.opened)[0], parts_of(thoughts.closed)[0]) if thoughts else ("", "")
        sure = [form for form in forms if self._must_call or not form.known_names]
        begun = Finder([parts[0] for form in sure for parts in heads_of(form)])
        inside, outside = Finder((closed, *heads)), Finder((opened, closed, *heads, *drops))
        if self._in_reasoning:
            out.change("reasoning")
        while True:
            at_start = out.kind == "content" and out.blank and any(form.at_start for form in forms)
            if at_start and (yield from self._section(forms, at_start=True)):
                continue
            finder = inside if out.kind == "reasoning" else outside
            held = None if out.kind == "reasoning" else begun
            found = yield from reader.until(finder, lambda text: out.text(text, reader), drops=held)
            if not found:
                if reader.at < len(reader.text):
                    out.mark()
                return
            if thoughts and (yield from self._reasoning_mark(thoughts)):
                continue
            if (yield from self._section(forms, at_start=False)):
                continue
            for drop in drops:
                if out.kind == "content" and (yield from reader.literal(drop)):
                    out.mark()
                    break
            else:
                out.text(reader.text[reader.at], reader)
                reader.at += 1

    def _reasoning_mark(self, thoughts: ReasoningFormat) -> Wait:
        """Read a mark of reasoning. One in the middle of content is text, unless it is a control token."""
        out = self._out
        is_mark = out.kind == "reasoning" or out.blank or MARKS.match(self._reader.text[self._reader.at])
        if not is_mark:
            return False
        if (yield from self._reader.mark(thoughts.closed)):
            out.change("content")
            return True
        if out.kind == "content" and (yield from self._reader.mark(thoughts.opened)):
            out.change("reasoning")
            return True
        return False

    def _section(self, forms: Sequence[CallFormat], *, at_start: bool) -> Wait:
        """Read calls in one of the forms; return whether there was one."""
        reader = self._reader
        here = reader.at
        for form in forms:
            if form.at_start == at_start:
                reader.ran_out = False
                if (yield from self._calls_of(form)):
                    if reader.is_cut and reader.ran_out:  # in a mark behind a call
                        reader.at = len(reader.text)
                    return True
                reader.at = here
                # Without a mark, or with a weak one, it may as well be text.
                is_call = self._must_call or not (at_start or form.known_names or self._out.kind == "reasoning")
                if is_call and reader.is_cut and reader.ran_out and here < len(reader.text):
                    self._out.mark()
                    reader.at = len(reader.text)
                    return True
        return False

    def _calls_of(self, form: CallFormat) -> Wait:
        reader, calls = self._reader, self._calls
        calls.only_known = form.known_names or self._out.kind == "reasoning"
        if not (yield from reader.mark(form.section[0])) and not form.call[0]:
            return False
        from edgelm.text.calls.bodies import read_call  # most answers call nothing

        count = calls.count
        while True:
            here = reader.at
            if calls.count > count and form.separator.strip():
                yield from reader.mark(form.separator)
            if not (yield from reader.mark(form.call[0])) or not (yield from read_call(reader, form, calls)):
                reader.at = here
                break
            yield from reader.mark(form.call[1])
            calls.end(cut_off=reader.ended and calls.is_cut)
            reader.forget()
        if calls.count == count:
            return False
        yield from reader.mark(form.section[1])
        return True

    def _begin_inside(self, prompt: str) -> None:
        """Give the parser the beginning of a call, where the prompt ends with one."""
        assert self._form
        marks = [parts[0] for form in (self._form, *self._form.also) for parts in heads_of(form)]
        mark = max((mark for mark in marks if prompt.endswith(mark)), key=len, default="")
        self._reader.add(mark)
        self._out.prompt_len = len(mark)
        self._out.arrived(len(mark), False)
