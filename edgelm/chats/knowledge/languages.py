"""Questions in other languages, in the words of the English guide.

Owns the languages, how one is recognized, and the line that says that a quotation is in English. The words are in
languages.txt.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

FILE = "languages.txt"
MAX_QUESTION = 2_000  # characters that are read
LINES = {
    "de": "edgelms Anleitung gibt es nur auf Englisch. Das steht dort dazu:",
    "fr": "Le guide d'edgelm n'existe qu'en anglais. Voici ce qu'il en dit :",
    "zh": "edgelm 的指南只有英文版\uff0c其中的相关内容如下\uff1a",
}
# Short words by which a language is told from English; those that English has, too, are no help.
_COMMON = {
    "de": "ich ist sind der das dem den ein eine einen einem einer und oder nicht kein keine wie wo wer warum wird "
    "werden für mit auf aus bei von zu zum zur es mein meine meinen meiner kann soll mir mich im vom auch noch "
    "schon nur mehr wenn dann".split(),
    "fr": "je sont le la les un une des du de et ou pas comment pourquoi où quel quelle quels quelles combien que "
    "qui pour avec dans sur mon ma mes ce cette ça il elle nous vous peut puis faut fait est".split(),
}
_ENGLISH = frozenset(
    "a an the i is are do does did how what which why where when who can could should will would to of for from in on "
    "at it its my me you your with without and or not no this that there have has use get make more".split()
)
_NAMES = frozenset("edgelm ollama openai qwen gemma gguf json api gpu mcp lora nvidia amd cuda vulkan".split())
LONGEST_SHORT_NAME = 4  # GGUF; a longer word in capitals is a word that is stressed
HAN = re.compile(r"[\u3400-\u9fff]")
_OTHER_ASIAN = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")  # Japanese and Korean
_WORD = re.compile(r"[^\W_]+")
_VARIABLE = re.compile(r"(?<![^\W_])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![^\W_])")
_ENDINGS = "", "e", "en", "n", "s", "x"  # of a plural


class _Words(NamedTuple):
    found: re.Pattern[str]
    english: dict[str, str]  # by the beginnings of words
    common: frozenset[str]  # of the English words: those that any question has


def language_of(question: str) -> str:
    """Return the language of a question, if it is one of LINES; empty: English, or another."""
    text = question[:MAX_QUESTION]
    if HAN.search(text) and not _OTHER_ASIAN.search(text):
        return "zh"
    words = _WORD.findall(text.lower())
    english = sum(word in _ENGLISH for word in words)
    scores = {name: sum(word in common for word in words) for name, common in _COMMON.items()}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] > english else ""


def language_of_word(word: str) -> str:
    """Return the language that has a word for one of the guide, in the singular or plural; empty: none has."""
    folded = word.casefold()
    stems = {folded.removesuffix(ending) for ending in _ENDINGS}
    return next((name for name, table in _tables().items() if not stems.isdisjoint(table.english)), "")


def in_english(question: str, language: str) -> str:
    """Return the words of a question that the guide has, in English; names and numbers stay as they are.

    Empty: there is no such word, and no name of _NAMES, apart from those that any question has.
    """
    table = _tables()[language]
    text = question[:MAX_QUESTION].casefold().replace("\u2019", "'")
    words = [table.english[match["word"]] for match in table.found.finditer(text)]
    # In a question that is all in capitals, they are no sign of a name.
    whole = question[:MAX_QUESTION].lower() if question.isupper() else question[:MAX_QUESTION]
    latin = [
        word for word in _WORD.findall(HAN.sub(" ", whole)) if word.isascii() and word.lower() not in table.english
    ]
    if language != "zh":
        variables = {part.lower() for name in _VARIABLE.findall(question[:MAX_QUESTION]) for part in name.split("_")}
        latin = [
            word
            for word in latin
            if word.lower() in variables or (_is_name(word) and word.lower() not in _COMMON[language])
        ]
    if table.common.issuperset(words) and _NAMES.isdisjoint(map(str.lower, latin)):
        return ""
    return " ".join([*dict.fromkeys(words), *latin])


def _is_name(word: str) -> bool:
    """Tell whether a word is one that no language translates: with a digit, in a few capitals, or a program's."""
    is_stressed = word.isupper() and len(word) > LONGEST_SHORT_NAME
    return bool(re.search(r"\d" if is_stressed else r"\d|.[A-Z]", word)) or word.lower() in _NAMES


@cache
def _tables() -> dict[str, _Words]:
    tables: dict[str, dict[str, str]] = {name: {} for name in LINES}
    common: set[str] = set()
    is_common = True
    for line in files("edgelm.chats.knowledge").joinpath(FILE).read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            is_common = is_common and bool(line.strip())
            continue
        english, _, others = line.partition(": ")
        if is_common:
            common.add(english)
        for name, entries in zip(LINES, others.split("|"), strict=True):
            for entry in filter(None, map(str.strip, entries.split(","))):
                tables[name].setdefault(entry.casefold(), english)
    known = frozenset(common)
    return {name: _Words(_pattern(table, spaced=name != "zh"), table, known) for name, table in tables.items()}


def _pattern(table: dict[str, str], *, spaced: bool) -> re.Pattern[str]:
    """Match the entries; in a language with spaces at the beginning of a word, with the rest of it."""
    entries = "|".join(map(re.escape, sorted(table, key=len, reverse=True)))
    return re.compile(rf"(?<!\w)(?P<word>{entries})\w*" if spaced else f"(?P<word>{entries})")
