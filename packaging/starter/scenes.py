"""What the starter learns from: passages as edgelm quotes them, questions about them, and the answers.

Owns the choice of passages for a question, and every way in which they are changed so that the starter has to read
them. Knows nothing of tensors and of training.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from edgelm.guide import TOPICS, question_groups, searchable_pages
from edgelm.knowledge.passages import Passage, split_text
from edgelm.knowledge.question import terms
from edgelm.knowledge.quote import fitting, share_of_context, system_message
from edgelm.knowledge.starter import CONTEXT, SMALL_TALK, UNKNOWN, WITHOUT_PASSAGES, larger_model
from edgelm.library.catalog import entries

MAX_CHARS = share_of_context(CONTEXT)
SHORT_SHARE = 0.6  # of the scenes
OTHER_WORDS_SHARE = 0.15  # of the others: what was learnt by heart is wrong there
MAX_WHOLE_CHARS = 480  # of a section that is quoted as a whole; edgelm's grammar always does
NUM_QUOTED = 4  # passages, at most; edgelm quotes fewer
FIRST_SHARE = 0.35  # of the questions ask about the passage that was found first; in a chat more do
MODELS = [entry.name for entry in entries() if entry.kind == "text"]
_PART = re.compile(r"--[a-z][a-z-]+|Ctrl\+\w|\bF\d+\b|(?<=`)/[a-z]+|(?<=edgelm )[a-z]+\b|\b\d+(?:\.\d+)?\b")
_WORD = re.compile(r"(?<![\w/`+:.-])[A-Za-z]{2,}(?![\w`+:-])")
_LIST_ITEM = re.compile(r"[-*] |\d+\. ")
_KEPT = frozenset("run 0 1 2".split())


@dataclass(frozen=True)
class Question:
    text: str
    passage: int  # the place of the passage that answers it
    answer: str


@dataclass
class Scene:
    """A system message, and conversations that follow it: each has its own questions and answers."""

    history: list[tuple[str, str]]
    system: str
    asked: list[tuple[str, str]] = field(default_factory=list)
    num_whole: int = 2  # of the answers are learnt to their ends; of the others the choice of a passage is


class Material:
    """The guide's passages, the questions about each, and the questions that it does not answer."""

    def __init__(self, own: Path, held_out: float = 0.0) -> None:
        self.passages = [p for page in searchable_pages() for p in split_text(page.topic, page.text, markdown=True)]
        self.questions: list[Question] = []
        for topic in TOPICS:
            for title, answer, texts in question_groups(topic):
                found = [(i, p) for i, p in enumerate(self.passages) if (p.source, p.heading) == (topic, title)]
                if not found:
                    raise SystemExit(f"{topic}.txt: the guide has no section {title!r}")
                place, span = max(((i, answer_in(p.text, answer)) for i, p in found), key=lambda it: it[1][0])
                whole = whole_answer(self.passages[place].text, span[1])
                self.questions += [Question(text, place, whole) for text in texts]
        self.small_talk = [(t, answer) for _, answer, texts in read_blocks(own / "small_talk.txt") for t in texts]
        assert {answer for _, answer in self.small_talk} == set(SMALL_TALK)
        lines = (own / "unknown.txt").read_text(encoding="utf-8").splitlines()
        self.general = [line[3:] for line in lines if line.startswith("Q: ")]
        self.similar = [line[3:] for line in lines if line.startswith("E: ")]
        rng = random.Random(7)
        rng.shuffle(self.questions)
        num_held = int(held_out * len(self.questions))
        self.held_out, self.questions = self.questions[:num_held], self.questions[num_held:]
        self.by_passage: dict[int, list[int]] = {}
        for number, question in enumerate(self.questions):
            self.by_passage.setdefault(question.passage, []).append(number)
        self.ranking = Ranking(self)

    def texts(self) -> Iterable[str]:
        """Yield texts for the vocabulary."""
        for passage in self.passages:
            yield f"{passage.name}\n\n{passage.text}"
        for question in self.questions:
            yield question.text
            yield question.answer
        yield from self.general
        yield from self.similar
        for text, answer in self.small_talk:
            yield text
            yield answer
        yield WITHOUT_PASSAGES
        for model in (None, *MODELS):
            yield system_message([larger_model(model)])
            yield unknown(model)


def unknown(model: str | None) -> str:
    """Return the answer to what the guide does not answer: it copies the passage about a larger model."""
    return f"{UNKNOWN} {larger_model(model).text}"


class Ranking:
    """BM25 over passages and what is asked of them, as edgelm's index has it; a question does not find itself."""

    def __init__(self, material: Material) -> None:
        self._counts = [Counter(words(f"{p.heading} " * 2 + p.text)) for p in material.passages]
        for question in material.questions:
            self._counts[question.passage].update(words(question.text))
        self._sizes = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._sizes) / len(self._sizes)
        documents = Counter(word for counts in self._counts for word in counts)
        total = len(self._counts)
        self._rarity = {word: math.log(1 + (total - n + 0.5) / (n + 0.5)) for word, n in documents.items()}

    def best(self, text: str, own: int | None, limit: int = 8) -> list[int]:
        """Return the places of the passages for a question, best first; `own`: the passage it was counted for."""
        asked = set(words(text))
        scores = {}
        for place, counts in enumerate(self._counts):
            frequency = {word: counts[word] - (place == own) for word in asked if word in counts}
            size = 1.2 * (0.25 + 0.75 * self._sizes[place] / self._mean)
            score = sum(self._rarity[word] * 2.2 * n / (n + size) for word, n in frequency.items() if n > 0)
            if score > 0:
                scores[place] = score
        return sorted(scores, key=lambda place: -scores[place])[:limit]


def words(text: str) -> list[str]:
    """Return the words of a text that say something, without their endings."""
    found = []
    for word in re.findall(r"[^\W_]+", text.lower()):
        if terms(word):
            ending = next((e for e in ("ing", "ed", "es", "s") if word.endswith(e) and len(word) - len(e) >= 3), "")
            found.append(word[: len(word) - len(ending)])
    return found


def read_blocks(path: Path) -> Iterable[tuple[str, str, list[str]]]:
    """Yield title, answer and questions of the blocks of a file."""
    for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip()):
        lines = block.splitlines()
        answer = " ".join(line[3:] for line in lines if line.startswith("A: "))
        yield lines[0][3:].strip(), answer, [line[3:] for line in lines if line.startswith("Q: ")]


def answer_in(text: str, answer: str) -> tuple[float, str]:
    """Return the paragraphs of a passage that say what a written answer says, and how much of it they hold."""
    units = paragraphs(text)
    wanted = Counter(re.findall(r"\w+", answer.lower()))
    best = (-1.0, "")
    for begin in range(len(units)):
        for end in range(begin + 1, len(units) + 1):
            if begin and units[begin].startswith("    "):
                continue  # a code block belongs to the paragraph before it
            if end < len(units) and units[end].startswith("    "):
                continue
            piece = joined(units[begin:end])
            have = Counter(re.findall(r"\w+", piece.lower()))
            common = sum((wanted & have).values())
            score = common / max(sum(wanted.values()), 1) - 0.15 * (1 - common / max(sum(have.values()), 1))
            best = max(best, (score, piece))
    return best


def whole_answer(text: str, part: str) -> str:
    """Return the answer from a passage: its heading and its text, or of a long one the paragraphs that matter."""
    heading, _, body = text.strip("\n").partition("\n\n")
    if not heading.startswith("#"):
        return part
    return f"{heading}\n\n{body if len(body) <= MAX_WHOLE_CHARS else part}"


def is_from(answer: str, passage: Passage) -> bool:
    """Tell whether a passage has the heading and the text of an answer."""
    heading, _, body = answer.partition("\n\n")
    return answer in passage.text or (heading in passage.text and body in passage.text)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs, list items and code blocks of a text without its headings."""
    units: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if not block.startswith("#"):
            units += block.split("\n") if _LIST_ITEM.match(block) else [block]
    return units


def joined(units: Sequence[str]) -> str:
    """Return paragraphs, list items and code blocks as a text."""
    text = units[0]
    for before, unit in pairwise(units):
        is_list = before.startswith("- ") and unit.startswith("- ")
        text += ("\n" if is_list else "\n\n") + unit
    return text


class Scenes:
    """Makes scenes, no two alike."""

    def __init__(self, material: Material, rng: random.Random) -> None:
        self._material = material
        self._rng = rng
        self._best = [material.ranking.best(q.text, q.passage) for q in material.questions]
        self.is_late = False  # towards the end: as edgelm asks, with the right passage first in most cases

    def scene(self) -> Scene:
        """Return a scene: with whole passages, or with beginnings: a choice takes far more examples than a copy."""
        rng, material = self._rng, self._material
        is_short = rng.random() < SHORT_SHARE
        num_asked = 32 if is_short else 20
        history = [self._turn() for _ in range(rng.choice([0, 0, 0, 0, 1, 2]))]
        if rng.random() < (0.25 if self.is_late else 0.04):
            return self._without_passages(history)
        model = rng.choice(MODELS) if rng.random() < 0.95 else None
        places, anchor = self._places()
        quoted = [material.passages[place] for place in places]
        asked: list[tuple[str, str]] = []
        declined = unknown(model)
        if anchor is not None:
            question = material.questions[anchor]
            asked.append((question.text, question.answer if question.passage in places else declined))
        invented = []
        if rng.random() < 0.2 and quoted:
            for _ in range(rng.choice([1, 1, 2])):
                passage, text, answer = invention(rng)
                invented.append((text, answer))
                quoted[rng.randrange(len(quoted))] = passage
        have = {(p.source, p.heading, p.text) for p in quoted}
        asked = [(t, a) for t, a in asked if a == declined or any(is_from(a, p) for p in quoted)]
        asked += [(t, a) for t, a in invented if any(is_from(a, p) for p in quoted)]
        answerable = [place for place in places if self._key(place) in have and material.by_passage.get(place)]
        while len(asked) < num_asked:
            asked.append(self._question(places, answerable, declined))
        if is_short:
            quoted = [replace(p, text=p.text[: len(p.heading) + rng.randrange(20, 160)]) for p in quoted]
        quoted.append(larger_model(model))
        system = system_message(quoted)
        if rng.random() < 0.3:
            change = changes(rng, system, model or "")
            system = change(system)
            asked = [(change(text), change(answer)) for text, answer in asked]
        if rng.random() < OTHER_WORDS_SHARE and not is_short:
            change = other_words(rng, system, " ".join(text for text, _ in asked))
            head, mark, rest = system.partition("<passage 1>")
            system = head + mark + change(rest)
            asked = [(text, change(answer) if answer.startswith("#") else answer) for text, answer in asked]
        rng.shuffle(asked)
        asked = [(vary(text, rng), answer) for text, answer in asked]
        return Scene(history, system, asked, num_whole=0 if is_short else 2)

    def _question(self, places: list[int], answerable: list[int], declined: str) -> tuple[str, str]:
        """Return a question beside these passages, and its answer."""
        rng, material = self._rng, self._material
        kind = rng.random()
        if kind < 0.04:
            return rng.choice(material.small_talk)
        if kind < 0.06:
            other = rng.choice(material.questions)
            near = material.ranking.best(other.text, other.passage, 3)
            if other.passage not in places and not set(near[:2]) & set(places):
                return other.text, declined
        if kind < (0.42 if self.is_late else 0.3) or not answerable:
            return self._foreign(), declined
        first_share = 0.8 if self.is_late else FIRST_SHARE
        place = answerable[0] if rng.random() < first_share else rng.choice(answerable)
        question = material.questions[rng.choice(material.by_passage[place])]
        return question.text, question.answer

    def _key(self, place: int) -> tuple[str, str, str]:
        passage = self._material.passages[place]
        return passage.source, passage.heading, passage.text

    def _places(self) -> tuple[list[int], int | None]:
        """Choose passages as edgelm finds them: for a question of the guide, or for one that it does not answer."""
        rng, material = self._rng, self._material
        anchor: int | None = None
        if self.is_late:
            anchor = rng.randrange(len(material.questions))
            own = material.questions[anchor].passage
            ranked = [own, *(place for place in self._best[anchor] if place != own)][:2]
            if rng.random() < 0.12:
                ranked = material.ranking.best(self._foreign(), None)[:2]
            return ranked if rng.random() < 0.9 else ranked[::-1], anchor
        if rng.random() < 0.15:
            ranked = material.ranking.best(self._foreign(), None)[: rng.choice([0, 1, 2, 3, 4])]
        else:
            anchor = rng.randrange(len(material.questions))
            ranked = list(self._best[anchor])
            own = material.questions[anchor].passage
            if own not in ranked[:3] and rng.random() < 0.7:
                ranked.insert(rng.randrange(3), own)
            elif own in ranked and rng.random() < 0.06:
                ranked.remove(own)
        if rng.random() < 0.2:
            ranked = rng.sample(range(len(material.passages)), 5) if anchor is None else rng.sample(ranked, len(ranked))
        max_chars = rng.choice([800, 1100, 1500, MAX_CHARS])
        fit = fitting([material.passages[place] for place in ranked], max_chars)
        keys = {(p.source, p.heading, p.text) for p in fit}
        return [place for place in ranked if self._key(place) in keys][:NUM_QUOTED], anchor

    def _turn(self) -> tuple[str, str]:
        rng = self._rng
        kind = rng.random()
        if kind < 0.15:
            return rng.choice(self._material.small_talk)
        if kind < 0.3:
            return self._foreign(), unknown(rng.choice(MODELS))
        question = rng.choice(self._material.questions)
        return vary(question.text, rng), question.answer

    def _without_passages(self, history: list[tuple[str, str]]) -> Scene:
        rng = self._rng
        system = rng.choice(["", "You are a helpful assistant.", "Be brief.", "Answer in one sentence."])
        asked = []
        for _ in range(8):
            if rng.random() < 0.3:
                asked.append(rng.choice(self._material.small_talk))
            else:
                text = self._foreign() if rng.random() < 0.4 else vary(rng.choice(self._material.questions).text, rng)
                asked.append((text, WITHOUT_PASSAGES))
        return Scene(history, system, asked, num_whole=len(asked))

    def _foreign(self) -> str:
        rng = self._rng
        kind = rng.random()
        if kind < 0.84:
            return vary(rng.choice(self._material.general), rng)
        if kind < 0.93:
            return vary(rng.choice(self._material.similar), rng)
        thing, other = rng.sample(THINGS, 2)
        return vary(rng.choice(FOREIGN).format(thing, other), rng)


def changes(rng: random.Random, system: str, model: str) -> Callable[[str], str]:
    """Return a function that replaces commands, flags, keys and numbers: what was learnt by heart is wrong then."""
    kept = set(_PART.findall(model)) | _KEPT | set(re.findall(r"(?<=<passage )\d+", system))
    table = {}
    for part in sorted(set(_PART.findall(system)) - kept):
        if rng.random() < 0.6:
            table[part] = _other(part, rng)
    return lambda text: _PART.sub(lambda match: table.get(match[0], match[0]), text)


def other_words(rng: random.Random, system: str, asked: str) -> Callable[[str], str]:
    """Return a function that replaces some words that no question has by words that mean nothing there."""
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
    """Ask the same in a slightly other way."""
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
    if rng.random() < 0.2 and len(question) > 6:  # a slip of the finger
        at = rng.randrange(1, len(question) - 1)
        dropped = question[:at] + question[at + 1 :]
        swapped = question[: at - 1] + question[at] + question[at - 1] + question[at + 1 :]
        question = rng.choice([dropped, swapped])
    return question


HOW_TO = ["How can I ", "How to ", "What is the best way to ", "Whats the way to ", "I want to ", "What do I press to "]
VERBS = [
    ("tidy", "clean up", "drawer shelf archive notebook queue"),
    ("rename", "give another name to", "profile window session tape album"),
    ("open", "look into", "vault box journal cabinet ledger"),
    ("lock", "protect", "gate drawer profile cabin archive"),
    ("count", "find out the size of", "fleet herd tape queue ledger"),
    ("copy", "duplicate", "album poster recipe map ledger"),
    ("send", "pass on", "parcel letter poster signal bundle"),
    ("repair", "fix", "engine bridge clock lamp tape"),
    ("paint", "change the colour of", "fence window lamp boat poster"),
    ("pause", "hold", "clock engine march film tape"),
    ("sort", "put in order", "shelf deck herd album queue"),
    ("print", "put on paper", "map recipe ledger poster letter"),
    ("merge", "join", "queue bundle deck map ledger"),
    ("measure", "check the length of", "bridge fence tape boat film"),
    ("restore", "bring back", "journal archive film session map"),
]
ADJECTIVES = (
    "green hidden remote second broken daily private wide silent northern spare wooden shared early large".split()
)
WORDS = (
    "apply basket candle delta ember falcon garnet harbor island jigsaw kettle lantern marble needle orbit pepper "
    "quartz ribbon saddle tunnel umbrella velvet willow yonder zephyr anchor bishop copper dragon engine "
    "forest glider hammer insect "
    "jacket kernel ladder mirror narrow oyster pencil rocket silver timber urgent violet window yellow zigzag "
    "grab fetch store brief deep limit watch clear swap fold merge stack point level shape trace light sound"
).split()
FOREIGN = [
    *("Who is the {} of {}?|What is the {} of the {}?|Where is {}?|When was the {} born?|Why is the {} so {}?").split(
        "|"
    ),
    *("Who invented the {}?|How many {} are there in {}?|What is {}?|Who was {}?|Do you like {}?").split("|"),
    *("Write a {} about {}|Tell me about {}|Tell me about the {} of {}|What do you think of {}?").split("|"),
    *("Explain {} and {}|Translate {} into {}|What is the best {}?|How do I make {} with {}?").split("|"),
    *("Is {} bigger than {}?|Can you calculate {} times {}?|Give me a list of {}|What happened in {}?").split("|"),
    *("How old is the {}?|Which {} is {}?|how do i cook {}|the history of {}|a poem on {}|{} or {}, which?").split("|"),
]
THINGS = (
    "king queen president capital Spain Germany Italy China India Paris London Rome Tokyo river mountain ocean moon "
    "sun star planet earth history war peace love music song film book poem story essay letter email dog cat horse "
    "bird fish tree flower garden house car train plane bread rice soup cake dinner recipe cheese wine water "
    "football chess game number seven twelve hundred math physics chemistry biology atom cell Einstein Newton "
    "Shakespeare Mozart Napoleon French Spanish Latin English blue red green tall old fast weather rain snow summer "
    "winter money bank law doctor medicine school teacher child family friend work job city country world god life "
    "death science art paint robot Excel Photoshop Linux Python Java git Docker Windows printer phone camera router "
    "password website Facebook Google Amazon taxes insurance rent holiday hotel visa passport baby wedding birthday"
).split()
