"""Scenes, the examples for training: a system message with quoted passages, and conversations that follow it.

Owns the choice of passages and questions for a scene. Knows nothing of tensors and of training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from changes import invention, other_names, other_words, vary
from material import MODELS, Material, is_from, unknown
from word_lists import FOREIGN, THINGS

from edgelm.chats.knowledge.quote import fitting, share_of_context, system_message
from edgelm.chats.knowledge.starter import CONTEXT, WITHOUT_PASSAGES, larger_model

MAX_CHARS = share_of_context(CONTEXT)
SHORT_SHARE = 0.6  # of the scenes
OTHER_WORDS_SHARE = 0.15  # of the other scenes: an answer learnt by heart is wrong there
NUM_QUOTED = 4  # passages, at most; edgelm quotes fewer
FIRST_SHARE = 0.35  # of the questions are about the best passage; in a chat more are


@dataclass
class Scene:
    """A system message, and conversations that follow it: a question and its answer make one conversation."""

    history: list[tuple[str, str]]
    system: str
    asked: list[tuple[str, str]] = field(default_factory=list)
    num_whole: int = 2  # answers that are learnt to their ends; of the others only the choice of a passage is learnt


class Scenes:
    """Makes random scenes."""

    def __init__(self, material: Material, rng: random.Random) -> None:
        self._material = material
        self._rng = rng
        self._best = [material.ranking.best(q.text, q.passage) for q in material.questions]
        self.is_late = False  # the last phase: passages as edgelm finds them, the right one first in most cases

    def scene(self) -> Scene:
        """Return a scene with whole passages, or with their beginnings: to choose takes more examples than to copy."""
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
            change = other_names(rng, system, model or "")
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
        """Return a question to be asked with these passages, and its answer."""
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
