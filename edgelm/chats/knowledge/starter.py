"""The passages that the starter reads for a question, and the answers that it may give: quotations, or that none fits.

Owns the sentences that the starter was trained with. Knows nothing of the catalogue.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from edgelm.base.passages import Passage
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.knowledge.guide import searchable_pages
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.knowledge.languages import HAN, LINES, in_english, language_of, language_of_word
from edgelm.chats.knowledge.passages import split_text
from edgelm.chats.knowledge.question import LEAST_PREFIX, terms
from edgelm.chats.knowledge.quote import MOST_CHARS, fitting, share_of_context
from edgelm.chats.knowledge.sections import Section, guess

CONTEXT = 3072  # tokens, of the starter
UNKNOWN_SHARE = 0.82  # from this probability of "no section" on, the guide has no answer
SURE_SHARE = 0.15  # below this one, the guide certainly has the answer
CLOSE = 0.5  # the difference of two sections, in log-probability, below which both are quoted
RANK_COST = 0.7  # of a rank of BM25, beside the log-probability of a section
MISSING_RANK = 4  # of a section that BM25 does not find
UNKNOWN = "Sorry, I know only edgelm, and I find nothing about that in its guide."
WITHOUT_PASSAGES = (
    "I answer from edgelm's guide, and no passage of it came with this question. The chat and `edgelm run starter` add "
    "them, and `edgelm help TOPIC` prints them."
)
SMALL_TALK = (
    "Hello! I am the starter, a very small model that comes with edgelm; ask me how to use it.",
    "You are welcome! Ask me more about edgelm whenever you like.",
    "Goodbye! Your chat is saved, and you find it in the list of chats next time.",
    "I am fine, thank you. I am small, but I like questions about edgelm.",
    "I am the starter, a very small model that comes with edgelm and knows only its guide.",
    "I was made for edgelm and am part of it; I was trained on questions about its guide.",
    (
        "I answer short questions about edgelm: models, memory, speed, the chat, the server, settings, and what to do "
        "when something is wrong. For anything else a bigger model is better."
    ),
    "No, I am a very small program: I have no feelings and no mind, and I know only edgelm's guide.",
    "I am sorry. I am a very small model and often wrong; try other words, or a bigger model.",
    "I know no jokes, but I can tell you how to use edgelm.",
    "All right. Ask me about edgelm when you like.",
)
_GREETING = re.compile(
    r"(?:(?:hi|hello|hey|hiya|greetings|good (?:morning|day|afternoon|evening)|hallo|moin|servus|gr(?:ü|ue)ss gott|"
    r"guten (?:tag|morgen|abend)|bonjour|bonsoir|salut|hola|(?:你好|您好|大家好|早上好|下午好|晚上好)啊?)(?: |$))+"
)
_FILLERS = frozenset(
    "there you to again all everyone dear my friend friends world machine bot ai edgelm starter an alle zusammen "
    "mein freund à tous toi mon ami".split()
)
_LARGER = "A larger model for this machine"
_SIZE = re.compile(r"\b\d+(?:[.,]\d+)?\s*(?:b|[kmg]i?b)\b", re.IGNORECASE)  # the guide has other examples
_COMPUTER = re.compile(r"\b(?:laptop|notebook|macbook|computer|pc)\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_FRAMES = frozenset(["chat", "create", "make", "mean"])  # words that any question may have, or any title
_PULL = re.compile(r"`/pull (\S+)`")


def starter_passages(knowledge: Knowledge, question: str, larger: str | None, context: int = CONTEXT) -> list[Passage]:
    """Return the passages that the starter reads for a question: the likeliest section, or two that are almost equal.

    The last one names `larger`, a model that fits this machine, unless the question is certainly about the guide.
    Raises EdgeLMError.
    """
    knowledge.refresh([GUIDE])
    last = larger_model(larger)
    original, language = question, _language(question)
    if _is_greeting(original):
        return [last]
    asked = _listed().get(_folded(original), set())
    question = _SIZE.sub("", in_english(question, language) if language else _COMPUTER.sub("machine", question))
    if language and not question and not asked:
        return [last]
    about = guess(question)
    if about.unknown >= UNKNOWN_SHARE and not asked:
        return [last]
    matches = {(p.source, p.heading): p for p in reversed(knowledge.search([GUIDE], question, max_chars=MOST_CHARS))}
    ranks = {section: rank for rank, section in enumerate(reversed(matches))}
    passages = guide_passages() | matches
    costs = {
        section: RANK_COST * ranks.get(section, MISSING_RANK) - logprob
        for section, logprob in about.sections.items()
        if section in passages and (not asked or section in asked)
    }
    best = sorted(costs, key=costs.__getitem__)[: 1 if asked else 2]
    likely = [passages[section] for section in best if costs[section] - costs[best[0]] < CLOSE]
    chosen = fitting(likely, share_of_context(context) - last.size)
    is_sure = about.unknown < SURE_SHARE or (bool(chosen) and _is_about(original, best[0]))
    return [*chosen, *([] if is_sure else [last])]


@functools.cache
def _listed() -> dict[str, set[Section]]:
    """Return the sections of the questions beside the guide, by their words. A single word may be small talk."""
    found: dict[str, set[Section]] = {}
    for page in searchable_pages():
        for title, texts in page.asked.items():
            for text in texts.split("\n"):
                if " " in (words := _folded(text)):
                    found.setdefault(words, set()).add((page.topic, title))
    return found


def _folded(question: str) -> str:
    return " ".join(_WORD.findall(question.casefold()))


def _is_greeting(question: str) -> bool:
    """Tell whether a text only greets: it has no other words but fillers, and at most one that may be a name."""
    others = _beside_greeting(question)
    if others is not None and len(others) == 1 and not HAN.search(others[0]):  # a sentence in Chinese has no space
        return others[0].isalpha() and others[0] not in _guide_words() and not language_of_word(others[0])
    return others == []


def _beside_greeting(question: str) -> list[str] | None:
    """Return the words behind a greeting, without fillers; None: it begins with none."""
    words = _folded(question)
    if (greeting := _GREETING.match(words)) is None:
        return None
    return [word for word in words[greeting.end() :].split() if word not in _FILLERS]


def _language(question: str) -> str:
    """Return the language of a question; of one word behind a greeting, the language that has it."""
    others = _beside_greeting(question)
    word = others[0] if others and len(others) == 1 and others[0] not in _guide_words() else ""
    return language_of(question) or (language_of_word(word) if word else "")


@functools.cache
def _guide_words() -> frozenset[str]:
    return frozenset(
        word for page in searchable_pages() for word in _folded(" ".join([page.text, *page.asked.values()])).split()
    )


def _is_about(question: str, section: Section) -> bool:
    """Tell whether a section certainly answers a question: one of its list, or one with no word but those of its title.

    Capitals, signs and the plural do not count.
    """
    if section in _listed().get(_folded(question), ()):
        return True
    words = {_singular(word) for word in terms(question)} - _FRAMES
    return bool(words) and words == {_singular(word) for word in terms(section[1])} - _FRAMES


def _singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > LEAST_PREFIX else word


@functools.cache
def guide_passages() -> dict[Section, Passage]:
    """Return the passages of the guide by their sections."""
    pages = searchable_pages()
    return {(p.source, p.heading): p for page in pages for p in split_text(page.topic, page.text, markdown=True)}


def larger_model(name: str | None) -> Passage:
    """Return the passage that the starter quotes if it knows no answer; `name`: None if no model fits the machine."""
    if name is None:
        text = "No larger model of the catalogue fits this machine's free memory. `edgelm pull` shows the catalogue."
    else:
        text = f"`edgelm pull {name}` downloads a larger model that fits this machine; in the chat, `/pull {name}`."
    return Passage("models", _LARGER, text)


def starter_answers(passages: Sequence[Passage], question: str = "") -> list[str]:
    """Return every answer that the starter may give to a question after it has read these passages.

    It quotes them, says that it does not know, or gives one of its own sentences: so it names no command that does not
    exist. To a question in another language, which it cannot read, it quotes what there is.
    """
    if _is_greeting(question):
        return [SMALL_TALK[0]]
    if (language := _language(question)) and (about := [p for p in passages if p.heading != _LARGER]):
        return ["\n\n".join([LINES[language], *(passage.text.strip("\n") for passage in about)])]
    answers = list(SMALL_TALK)
    if about := [p for p in passages if p.heading != _LARGER]:
        quoted = "\n\n".join(passage.text.strip("\n") for passage in about)
        if _is_about(question, (about[0].source, about[0].heading)):
            return [quoted]
        answers.append(quoted)
    answers += [f"{UNKNOWN} {passage.text}" for passage in passages if passage.heading == _LARGER]
    return answers if passages else [*answers, UNKNOWN, WITHOUT_PASSAGES]


def offered_model(answer: str) -> str | None:
    """Return the model that an answer of the starter offers because the guide has no answer; None: it offers none."""
    match = _PULL.search(answer) if answer.startswith(UNKNOWN) else None
    return match[1] if match else None
