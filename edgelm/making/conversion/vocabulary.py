"""The vocabulary of a folder as a GGUF has it: tokens with types and scores, merges, special tokens, templates.

Owns the choice between the kinds that the supported families have: letters for bytes with merges (GPT-2), pieces with
scores (SentencePiece), and words (WordPiece, of BERT).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gguf import GGUFWriter, TokenType

from edgelm.base.errors import ModelError
from edgelm.making.conversion.sentencepiece import SentencePieces, parse_pieces
from edgelm.making.conversion.special_tokens import SpecialTokens, read_special_tokens
from edgelm.making.conversion.splits import flattened, is_byte_level, split_rule
from edgelm.making.conversion.tokenizer_files import TOKENIZER, TokenizerFiles, damaged
from edgelm.making.conversion.wordpiece import as_llama_spells, is_wordpiece, read_wordpiece_rule, wordpiece_specials
from edgelm.text.known_vocabularies import SPACE

ADDED_SCORE, MISSING_SCORE = -1000.0, -10_000.0  # as llama.cpp's converter
BYTE_SPACE = "\u0120"  # the letter for the byte of a space
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# tokens that are not marked as special, and that no text of a user may contain
LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>", re.DOTALL)
OTHER = "run the folder itself, with the torch engine"
MAX_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The keys `tokenizer.*` of a GGUF."""

    model: str  # "gpt2": byte letters and merges; "llama": pieces and scores; "bert": words and their pieces
    pre: str  # how a text is split
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    adds_space: bool | None = None  # before a text; None: not stated
    special: SpecialTokens = field(default_factory=SpecialTokens)
    templates: Mapping[str, str] = field(default_factory=dict)
    strips: bool = False  # special tokens take the white space behind them
    lowers: bool | None = None  # texts become lower case; None: not stated
    strips_accents: bool | None = None


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before it is split."""

    id: int
    text: str
    special: bool
    strips: bool = False


def read_vocabulary(files: TokenizerFiles, num_rows: int) -> Vocabulary:
    """Return the vocabulary for an embedding of so many rows. Raises ModelError where llama.cpp has no such kind."""
    added = list(_added_tokens(files))
    if is_wordpiece(files):
        return _wordpiece(files, added, num_rows)
    letters = bool(files.tokenizer) and is_byte_level(files)
    pieces = None if letters or not files.pieces else parse_pieces(files.pieces)
    if pieces is not None and not pieces.is_bpe:
        raise ModelError("its tokenizer.model is no BPE model, and llama.cpp would split texts in another way", OTHER)
    if pieces is None and not files.tokenizer:
        raise ModelError(
            f"tokenizer.model is of an unknown kind, and there is no {TOKENIZER}",
            "download it again (edgelm pull --verify MODEL)",
        )
    if pieces is None and not letters and not _has_pieces(files):
        kind = files.section("model").get("type")
        raise ModelError(f"llama.cpp has no vocabulary of the kind {str(kind)[:20]!r} for this family", OTHER)
    special = read_special_tokens(files, pieces)
    table = _Table(num_rows)
    merges: list[str] = []
    if pieces is None:
        _require_rows(files, added, num_rows)
    if letters:
        merges = _byte_letters(files, table)
    elif pieces is not None:
        table.add_pieces(pieces)
    else:
        _scored(files, table)
    table.add(added, byte_letters=letters)
    return Vocabulary(
        model="gpt2" if letters else "llama",
        pre=split_rule(files) if letters else "default",
        tokens=table.tokens,
        types=table.types,
        scores=() if letters else table.scores,
        merges=merges,
        adds_space=None if letters else _adds_space(files, pieces),
        special=special.within(num_rows),
        templates=files.templates,
        strips=any(token.strips for token in added),
    )


def _wordpiece(files: TokenizerFiles, added: Sequence[AddedToken], num_rows: int) -> Vocabulary:
    """Return the vocabulary of a BERT."""
    rule = read_wordpiece_rule(files)
    _require_rows(files, added, num_rows)
    table = _Table(num_rows)
    for text, token in _tokens(files).items():
        kind = TokenType.UNKNOWN if text == rule.unknown else TokenType.NORMAL
        table.set(token, as_llama_spells(text), kind)
    table.add(added, byte_letters=True)
    return Vocabulary(
        model="bert",
        pre="default",
        tokens=table.tokens,
        types=table.types,
        special=wordpiece_specials(files, _tokens(files)),
        lowers=rule.lowers,
        strips_accents=rule.strips_accents,
    )


def write_vocabulary_keys(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """Add the keys of a vocabulary."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, token in vocabulary.special.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    for name, is_added in vocabulary.special.added.items():
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", is_added)
    if vocabulary.adds_space is not None:
        writer.add_add_space_prefix(vocabulary.adds_space)
    for key, value in (("lowercase", vocabulary.lowers), ("strip_accents", vocabulary.strips_accents)):
        if value is not None:
            writer.add_bool(f"tokenizer.ggml.normalizer.{key}", value)
    names = []
    for name, template in vocabulary.templates.items():
        key = re.sub(r"\W", "_", name, flags=re.ASCII)
        if name != "default":
            names.append(key)
        writer.add_string("tokenizer.chat_template" + ("" if name == "default" else f".{key}"), template)
    if names:
        writer.add_array("tokenizer.chat_templates", names)


class _Table:
    """The tokens by id. Rows of the embedding without a token get a name that no text contains."""

    def __init__(self, num_rows: int) -> None:
        self.tokens = [f"[PAD{i}]" for i in range(num_rows)]
        self.types = [int(TokenType.UNUSED)] * num_rows
        self.scores = [MISSING_SCORE] * num_rows

    def set(self, token: int, text: str, kind: int, score: float = 0.0) -> None:
        """Set a token; one that the embedding has no row for is left out."""
        if token < len(self.tokens):
            self.tokens[token], self.types[token], self.scores[token] = text, int(kind), score

    def add_pieces(self, pieces: SentencePieces) -> None:
        for token, piece in enumerate(pieces.pieces):
            self.set(token, piece.text, piece.type, piece.score)

    def add(self, added: Sequence[AddedToken], *, byte_letters: bool) -> None:
        for token in added:
            if token.id < len(self.types) and self.types[token.id] == TokenType.UNKNOWN:
                continue
            control = token.special or LOOKS_SPECIAL.fullmatch(token.text) is not None
            text = token.text if control or byte_letters else token.text.replace(SPACE, " ")
            kind = TokenType.CONTROL if control else TokenType.USER_DEFINED
            self.set(token.id, text, kind, ADDED_SCORE)


def _byte_letters(files: TokenizerFiles, table: _Table) -> list[str]:
    """Fill the table with the tokens of a byte-level BPE; return its merges."""
    for text, token in _tokens(files).items():
        table.set(token, text, TokenType.NORMAL)
    return [" ".join(part.replace(" ", BYTE_SPACE) for part in pair) for pair in _merges(files)]


def _scored(files: TokenizerFiles, table: _Table) -> None:
    """Fill the table with the pieces of a BPE without byte letters.

    Its merges have an order, and llama.cpp joins the pair whose piece has the best score: that is the earliest merge.
    """
    ids = _tokens(files)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(files)):
        ranks.setdefault(left + right, rank)
    unknown = files.section("model").get("unk_token")
    last = float(-len(ranks) - 1)
    for text, token in ids.items():
        kind = TokenType.NORMAL
        if text == unknown:
            kind = TokenType.UNKNOWN
        elif BYTE.fullmatch(text):
            kind = TokenType.BYTE
        table.set(token, text, kind, float(-ranks[text]) if text in ranks else last)


def _require_rows(files: TokenizerFiles, added: Sequence[AddedToken], num_rows: int) -> None:
    """Raise ModelError for a tokenizer of another model. Added tokens may lack a row: some models do not use them."""
    known = {token.id for token in added}
    beyond = next((token for token in _tokens(files).values() if token >= num_rows and token not in known), None)
    if beyond is not None:
        raise ModelError(
            f"{TOKENIZER} has a token {beyond:,}, and the embedding has {num_rows:,} rows", "use the model's own files"
        )


def _tokens(files: TokenizerFiles) -> Mapping[str, int]:
    vocab = files.section("model").get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise damaged("it has no vocabulary")
    if not all(type(token) is int and 0 <= token < MAX_TOKENS for token in vocab.values()):
        raise damaged("the id of a token is no number")
    if len(set(vocab.values())) < len(vocab):
        raise damaged("two tokens have one id")
    return vocab


def _merges(files: TokenizerFiles) -> Iterator[tuple[str, str]]:
    """Yield the pairs that are joined, in their order: each is one string or two."""
    merges = files.section("model").get("merges")
    if not isinstance(merges, list):
        raise damaged("it has no merges")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise damaged("a merge is not a pair of strings")
        yield pair[0], pair[1]


def _added_tokens(files: TokenizerFiles) -> Iterator[AddedToken]:
    """Yield the tokens that are found before a text is split: those of tokenizer.json hold."""
    decoder = files.config.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(entry, Mapping) and key.isdecimal():
            yield _added_token(int(key), entry)
    entries = files.tokenizer.get("added_tokens") or []
    if not isinstance(entries, list):
        raise damaged("added_tokens is no list")
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise damaged("an added token is no object")
        yield _added_token(entry.get("id"), entry)


def _added_token(token: object, entry: Mapping[str, Any]) -> AddedToken:
    text = entry.get("content")
    if not isinstance(token, int) or not 0 <= token < MAX_TOKENS or not isinstance(text, str) or not text:
        raise damaged("an added token has no id, or no text")
    return AddedToken(token, text, entry.get("special") is True, entry.get("rstrip") is True)


def _has_pieces(files: TokenizerFiles) -> bool:
    """Tell whether a tokenizer.json is a BPE with the spelling of SentencePiece."""
    model = files.section("model")
    return model.get("type", "BPE") == "BPE" and (
        model.get("byte_fallback") is True or any(SPACE in str(step) for step in flattened(files, "normalizer"))
    )


def _adds_space(files: TokenizerFiles, pieces: SentencePieces | None) -> bool:
    """Tell whether a space comes before a text, as the newest of the files states it."""
    stated = files.config.get("add_prefix_space")
    if isinstance(stated, bool):
        return stated
    if not files.tokenizer:
        return pieces is None or pieces.adds_space
    for step in (*flattened(files, "normalizer"), *flattened(files, "pre_tokenizer")):
        if step.get("type") == "Prepend":
            return True
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            return bool(scheme != "never")
    return False
