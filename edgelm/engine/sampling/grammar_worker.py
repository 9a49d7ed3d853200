"""The worker that checks grammars: it translates one for llguidance and compiles it on trial, within limits.

A schema of one line can take llguidance minutes and gigabytes ({"multipleOf": 99999989}), and native code cannot be
interrupted. Here such a grammar ends this process alone. Knows nothing of models: the trial's vocabulary is the bytes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from functools import cache, partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from edgelm.base.errors import RequestError
from edgelm.base.workers.child import Child, answer_requests, limit_memory
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec
from edgelm.engine.sampling.grammar_limits import first_line, parser_limits
from edgelm.engine.sampling.schema import for_llguidance, parse_schema, without_patterns
from edgelm.engine.sampling.unique_lists import Lists, merged, unique_lists

MAX_CPU_S = 2.0  # for one grammar; the slowest of 9,557 schemas in real use takes 1.9 s with a vocabulary
MAX_MEMORY_BYTES = 1 << 30
_EOS = 256  # behind the bytes, in the vocabulary of the trial
_NICE = 5  # decoding comes first
_TOKEN = re.compile(r"<\[[^\]]*\]>|<\|[^|>\s]*\|>")  # a special token in Lark
_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/\n]")


def check_grammar(spec: GrammarSpec) -> CheckedGrammar:
    """Translate a grammar and compile it on trial. Raises RequestError, which names the cause."""
    match spec.kind:
        case "json_object":
            return _checked_schema({"type": "object"}, spec)
        case "json_schema":
            return _checked_schema(parse_schema(spec.source), spec)
        case "regex":
            return _checked(LLMatcher.grammar_from_regex(spec.source), "the regex")
        case "choice":
            return _checked(LLMatcher.grammar_from_regex(_choice_regex(spec.source)), "the list of choices")
        case "gbnf":
            return _checked(LLMatcher.grammar_from_lark(_lark_of_gbnf(spec.source)), "the GBNF grammar")
        case "lark":
            return _checked_lark(spec)


# -- languages ---------------------------------------------------------------------------------------------------------


def _checked_schema(schema: dict[str, Any], spec: GrammarSpec) -> CheckedGrammar:
    options, relaxed, unique = _enforceable(schema, strict=spec.strict)
    return CheckedGrammar(
        LLMatcher.grammar_from_json_schema(json.dumps(options)), tuple(relaxed), unique=_as_text(unique)
    )


def _enforceable(schema: dict[str, Any], *, strict: bool) -> tuple[dict[str, Any], list[str], Lists]:
    """Return a schema that compiles, with options, the keywords that are not enforced, and the lists of `uniqueItems`.

    Where a keyword is unknown to llguidance, that is a stronger schema. One that is not strict is relaxed as far as
    necessary, in the end to any JSON.
    """
    from edgelm.engine.sampling.stronger import stronger  # other grammars need no algebra of schemas

    unique = unique_lists(schema)
    reason = ""
    for form in (dict, stronger, partial(stronger, merge_patterns=True)):
        exact = for_llguidance(form(schema), lenient=False)
        failure, _ = _trial(LLMatcher.grammar_from_json_schema(json.dumps(exact)))
        if failure is None:
            return exact, [], unique
        reason = failure if not reason or _keywords(failure) else reason
    if strict:
        raise _unsupported(reason)
    strong = stronger(schema)
    for weaker, dropped in ((strong, []), (schema, []), (without_patterns(schema), ["pattern"])):
        lenient = for_llguidance(weaker, lenient=True)
        weaker_reason, warnings = _trial(LLMatcher.grammar_from_json_schema(json.dumps(lenient)))
        if weaker_reason is None:
            keywords = [keyword for warning in warnings for keyword in _keywords(warning)]
            return lenient, [*dropped, *(keyword for keyword in keywords if keyword != "uniqueItems")], unique
    anything = {"type": "object"} if schema.get("type", "object") == "object" else {}
    return for_llguidance(anything, lenient=False), [f"the whole schema: {reason}"], {}


def _as_text(lists: Lists) -> str:
    return json.dumps(lists) if lists else ""


def _unsupported(reason: str) -> RequestError:
    keywords = _keywords(reason)
    if keywords:
        names = ", ".join(f'"{keyword}"' for keyword in keywords)
        return RequestError(
            f"the JSON schema uses {names}, which cannot be enforced", "remove it, or send strict: false"
        )
    return RequestError(f"the JSON schema cannot be enforced: {reason}", "change it, or send strict: false")


def _keywords(message: str) -> list[str]:
    """Return the keywords that a message of llguidance complains about."""
    if keys := _KEYS.search(message):
        return [str(keyword) for keyword in json.loads(keys[1])]
    return ["oneOf"] if message.startswith("oneOf ") else []


def _checked_lark(spec: GrammarSpec) -> CheckedGrammar:
    lark, relaxed = spec.source, []
    tables: list[Lists] = [json.loads(spec.unique)] if spec.unique else []
    for rule in spec.rules:
        assert _NAME.fullmatch(rule.name), rule.name
        schema = parse_schema(rule.schema)
        options, keywords, unique = _enforceable(schema, strict=rule.strict)
        tables.append(unique)
        lark += f"\n{rule.name}: %json {json.dumps(options)}\n"
        relaxed += keywords
    reason, _ = _trial(LLMatcher.grammar_from_lark(_TOKEN.sub(f"<[{_EOS}]>", lark)))
    if reason is not None:
        raise RequestError(f"the Lark grammar is not valid: {reason}", "correct it")
    return CheckedGrammar(LLMatcher.grammar_from_lark(lark), tuple(relaxed), unique=_as_text(merged(tables)))


def _choice_regex(source: str) -> str:
    """Return a regex for a JSON list of strings: one lexeme, where alternatives would each cost a row of the parser."""
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError("the choices are no list of strings", "send one or more strings")
    try:
        "".join(choices).encode()
    except UnicodeEncodeError:
        raise RequestError("a choice has half a character", "send UTF-8") from None
    return "|".join(_REGEX_SPECIAL.sub(_escaped, choice) for choice in choices)


def _escaped(match: re.Match[str]) -> str:
    return "\\n" if match[0] == "\n" else "\\" + match[0]


def _lark_of_gbnf(source: str) -> str:
    try:
        return gbnf_to_lark(source)
    except RecursionError:
        raise RequestError("the GBNF grammar is nested too deeply", "flatten it") from None
    except Exception as error:  # noqa: BLE001 - the library raises a plain one for a rule that is missing or there twice
        raise RequestError(f"the GBNF grammar is not valid: {first_line(str(error))}", "correct it") from None


# -- the trial ---------------------------------------------------------------------------------------------------------


class _Bytes:
    """The vocabulary of the trial, as llguidance takes it."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (_EOS,)
    eos_token_id = _EOS
    bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[_EOS])


def _trial(grammar: str) -> tuple[str | None, list[str]]:
    """Compile a grammar, compute its first mask and take a first byte. Return why that fails, and the warnings."""
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return first_line(matcher.get_error()), []
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error():
        reason = first_line(matcher.get_error())
        return "it allows no answer" if reason.startswith("NoExtension") else reason, []
    allowed = bits & ((1 << 256) - 1)
    if allowed and not (matcher.consume_token(allowed.bit_length() - 1) and matcher.rollback(1)):
        return first_line(matcher.get_error()), []
    return None, list(matcher.get_grammar_warnings())


def _checked(grammar: str, name: str) -> CheckedGrammar:
    reason, _ = _trial(grammar)
    if reason is not None:
        raise RequestError(f"{name} is not valid: {reason}", "correct it")
    return CheckedGrammar(grammar)


# -- the process -------------------------------------------------------------------------------------------------------


def _check(spec: GrammarSpec, child: Child) -> None:
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF ends the process, native code included
    try:
        checked = check_grammar(spec)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    child.send(replace(checked, cpu_s=time.process_time() - began))


if __name__ == "__main__":
    os.nice(_NICE)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_memory(MAX_MEMORY_BYTES)
    answer_requests({GrammarSpec: _check})
