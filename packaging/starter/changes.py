"""Changes to scenes that keep the starter from learning answers by heart: other names, other words, typing errors.

Owns these, and the passages about things that do not exist. Knows nothing of the guide's own passages.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable

from word_lists import ADJECTIVES, HOW_TO, THINGS, VERBS, WORDS

from edgelm.base.passages import Passage
from edgelm.chats.knowledge.guide import TOPICS

_PART = re.compile(r"--[a-z][a-z-]+|Ctrl\+\w|\bF\d+\b|(?<=`)/[a-z]+|(?<=edgelm )[a-z]+\b|\b\d+(?:\.\d+)?\b")
_WORD = re.compile(r"(?<![\w/`+:.-])[A-Za-z]{2,}(?![\w`+:-])")
_KEPT = frozenset("run 0 1 2".split())


def other_names(rng: random.Random, system: str, model: str) -> Callable[[str], str]:
    """Return a function that replaces commands, flags, keys and numbers: an answer learnt by heart is wrong then."""
    kept = set(_PART.findall(model)) | _KEPT | set(re.findall(r"(?<=<passage )\d+", system))
    table = {}
    for part in sorted(set(_PART.findall(system)) - kept):
        if rng.random() < 0.6:
            table[part] = _other(part, rng)
    return lambda text: _PART.sub(lambda match: table.get(match[0], match[0]), text)


def other_words(rng: random.Random, system: str, asked: str) -> Callable[[str], str]:
    """Return a function that replaces some words by words without meaning there; words of the questions stay."""
    last = system[system.rindex("<passage") :]
    headings = "" if rng.random() < 0.3 else " ".join(re.findall(r"^## .*$", system, re.MULTILINE))
    kept = {word.lower() for word in _WORD.findall(f"{asked} {last} {headings}")} | {"passage"}
    share = rng.choice([0.05, 0.15, 0.3])
    words = sorted(set(_WORD.findall(system)))
    table = {word: _like(word, rng) for word in words if word.lower() not in kept and rng.random() < share}
    return lambda text: _WORD.sub(lambda match: table.get(match[0], match[0]), text)


def _like(word: str, rng: random.Random) -> str:
    other = rng.choice([*WORDS, *THINGS])
    return other.capitalize() if word[0].isupper() else other.lower()


def _other(part: str, rng: random.Random) -> str:
    if part.startswith("--"):
        return "--" + "-".join(rng.choice(WORDS) for _ in range(rng.choice([1, 1, 2])))
    if part.startswith("Ctrl+"):
        return "Ctrl+" + rng.choice(string.ascii_uppercase)
    if part[0] == "F" and part[1:].isdigit():
        return f"F{rng.randrange(1, 13)}"
    if part.startswith("/"):
        return "/" + rng.choice(WORDS)
    if part[0].isdigit():
        return str(rng.randrange(2, 10 ** len(part.partition(".")[0]) + 20))
    return rng.choice(WORDS)


def invention(rng: random.Random) -> tuple[Passage, str, str]:
    """Return a passage about a thing that does not exist, a question about it, and the answer."""
    told, asked, thing = rng.choice(VERBS)
    noun = rng.choice(thing.split())
    adjective = rng.choice(ADJECTIVES)
    name = rng.choice([f"`--{_word(rng)}`", f"`/{_word(rng)}`", f"`edgelm {_word(rng)}`", f"`Ctrl+{_letter(rng)}`"])
    key = f"`{_word(rng)}`"
    number, unit = rng.randrange(2, 900), rng.choice("MiB GiB seconds minutes tokens lines files days".split())
    answer = rng.choice(
        [
            f"To {told} the {adjective} {noun}, use {name}. It takes {number} {unit}.",
            f"{name} will {told} the {adjective} {noun}. With {key} it keeps a copy.",
            f"The {adjective} {noun}: {name} is there to {told} it, at most {number} {unit} at a time.",
            f"You can {told} the {adjective} {noun} with {name}, or with {key} in `config.toml`.",
            f"{name} and then {key}: these two {told} the {adjective} {noun}.",
        ]
    )
    extra = rng.choice(
        [
            "",
            f"\n\n`{_word(rng)}` is the old name of it. It has {rng.randrange(2, 99)} fields.",
            f"\n\nA {rng.choice(ADJECTIVES)} one needs `--{_word(rng)}` as well.",
        ]
    )
    title = rng.choice(
        [f"{asked.capitalize()} the {noun}", f"The {adjective} {noun}", f"{adjective.capitalize()} {noun}s"]
    )
    text = rng.choice(
        [
            f"How do I {asked} the {adjective} {noun}?",
            f"{asked} {adjective} {noun}",
            f"what do I use to {told} the {adjective} {noun}",
            f"I want to {asked} my {noun}, the {adjective} one",
            f"Is there a way to {asked} a {adjective} {noun}?",
            f"how can the {adjective} {noun} be changed or so? I must {asked} it",
        ]
    )
    return Passage(rng.choice(TOPICS), title, f"## {title}\n\n{answer}{extra}"), text, f"## {title}\n\n{answer}"


def _word(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(WORDS)
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice([2, 2, 3])))


def _letter(rng: random.Random) -> str:
    return rng.choice(string.ascii_uppercase)


def vary(question: str, rng: random.Random) -> str:
    """Return a question in slightly other words, or with a typing error."""
    if question.startswith("How do I ") and rng.random() < 0.3:
        question = rng.choice(HOW_TO) + question.removeprefix("How do I ")
    if rng.random() < 0.3:
        question = question.lower()
    if rng.random() < 0.3:
        question = question.rstrip("?!.")
    if rng.random() < 0.1:
        question = rng.choice(["Please tell me: ", "Hey, ", "And ", "So ", "Ok, ", "Hello! ", "please, "]) + question
    if rng.random() < 0.08:
        question += rng.choice([" please", " thanks", " in edgelm", " here", " now", "?"])
    if rng.random() < 0.12:  # a word is left out
        parts = question.split(" ")
        if len(parts) > 5:
            parts.pop(rng.randrange(len(parts)))
            question = " ".join(parts)
    if rng.random() < 0.2 and len(question) > 6:  # a typing error
        at = rng.randrange(1, len(question) - 1)
        dropped = question[:at] + question[at + 1 :]
        swapped = question[: at - 1] + question[at] + question[at - 1] + question[at + 1 :]
        question = rng.choice([dropped, swapped])
    return question
