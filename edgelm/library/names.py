"""Model names as a person types them, parsed: the starter, a path, a catalogue name, a repository of the hub.

    starter                                     the model that comes with edgelm
    ./model.gguf  ~/models/qwen  a/b/c          a path: starts with / ./ ../ ~, ends with .gguf, or has many slashes
    FAMILY[:SIZE][:QUANT]                       qwen3   qwen3:4b   qwen3:4b:Q8_0   qwen3:Q8_0
    OWNER/NAME[:QUANT or FILE][@REVISION]       Qwen/Qwen3-4B-GGUF:Q8_0@main; hf.co/ or https://huggingface.co/ may
                                                precede it

The quantization always comes after the last colon. Knows neither the network nor the disk nor the catalogue: whether
a model exists is for the callers to find out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from edgelm.base.errors import ModelError

STARTER = "starter"
QUANTIZATION = r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|F16|F32|FP16|FP8)"  # as GGUF file names have it
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
MAX_LEN = 4096
FORMS = "a name is starter, a path, FAMILY:SIZE[:QUANT] or OWNER/NAME[:QUANT][@REVISION]"

_URL = re.compile(r"https?://([^/]*)/?(.*)", re.DOTALL | re.IGNORECASE)
_PAGE = re.compile(  # an address copied from a browser
    r"([^/:@]+/[^/:@]+)/(tree|blob|resolve|raw)/([^/]+)/?(.*)", re.DOTALL
)
_SEGMENT = re.compile(r"(?!.*(?:--|\.\.))\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_WORD = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_LABEL = re.compile(r"[A-Z0-9](?:[A-Z0-9._-]*[A-Z0-9])?")
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9](?:[\w./+-]*[\w.+-])?", re.ASCII)
_IS_QUANTIZATION = re.compile(QUANTIZATION, re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class StarterName:
    """The model that comes with edgelm."""

    def __str__(self) -> str:
        return STARTER


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A file or folder on this machine, as typed."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class CatalogName:
    """A catalogue name: lower case, but the quantization upper case."""

    family: str
    size: str | None = None  # None: the family's default
    quantization: str | None = None  # None: the entry's default

    def __str__(self) -> str:
        return ":".join(filter(None, (self.family, self.size, self.quantization)))


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model in a repository of the hub: the whole repository, one quantization, or one file."""

    repository: str  # OWNER/NAME
    quantization: str | None = None  # Q4_K_M
    file: str | None = None  # path inside the repository
    revision: str | None = None  # branch, tag or commit; None: main

    def __str__(self) -> str:
        choice = self.quantization or (quote(self.file, safe="/!#$&'()*+,:;=?[]~") if self.file else None)
        return self.repository + (f":{choice}" if choice else "") + (f"@{self.revision}" if self.revision else "")


Reference = StarterName | LocalPath | CatalogName | HubReference


def parse_name(text: str) -> Reference:
    """Parse a model name; `str()` of the result is again a name for it. Raises ModelError for any other text."""
    if "\0" in text or len(text) > MAX_LEN:
        raise _not_a_name(text, FORMS)
    hub = _without_host(text.strip())
    if hub is not None:
        return _parse_hub(hub, text)
    if _is_path(text):
        return LocalPath(text)
    text = text.strip()
    if text.casefold() == STARTER:
        return StarterName()
    return _parse_hub(text, text) if "/" in text else _parse_catalog(text)


def is_quantization(text: str) -> bool:
    """Return whether a text looks like a quantization label: Q4_K_M, BF16, UD-IQ2_XXS."""
    return _IS_QUANTIZATION.fullmatch(text) is not None


def is_revision(text: str) -> bool:
    """Return whether a text can be a branch, tag or commit of the hub; a path that leaves its folder cannot."""
    return _REVISION.fullmatch(text) is not None


def is_label(text: str) -> bool:
    """Return whether a text can follow the colon in place of a quantization, where case does not matter."""
    return text.isascii() and _LABEL.fullmatch(text.upper()) is not None


def shown(text: str, limit: int = 80) -> str:
    """Return a name in a form that is safe in one line on a terminal."""
    clean = "".join(char if char.isprintable() else "?" for char in text[: limit + 1])
    return (clean if len(clean) <= limit else clean[:limit] + "...") or "an empty text"


def _is_path(text: str) -> bool:
    if text in (".", "..") or text.startswith(("/", "./", "../", "~")) or text.endswith("/"):
        return True
    if ":" in text or "@" in text:
        return False  # a path with these characters needs ./ in front
    return text.casefold().endswith((".gguf", ".safetensors")) or text.count("/") > 1


def _without_host(text: str) -> str | None:
    """Return the part after the hub's address, None if the text has no address. Raises ModelError for another host."""
    if match := _URL.fullmatch(text):
        host, rest = match[1].casefold(), match[2]
        if host not in HOSTS:
            raise ModelError(
                f"{shown(text)} is not an address of the hub", "write OWNER/NAME; HF_ENDPOINT sets the hub"
            )
        return re.sub(r"[?#].*", "", rest, flags=re.DOTALL).rstrip("/")
    host, slash, rest = text.partition("/")
    return rest if slash and host.casefold() in HOSTS else None


def _parse_hub(text: str, typed: str) -> HubReference:
    if page := _PAGE.fullmatch(text):
        revision, file = unquote(page[3]), unquote(page[4]) if page[2] != "tree" else ""
        return _hub_reference(page[1], file, revision, typed)
    repository, colon, choice = text.partition(":")
    if colon and "@" in repository:
        raise _not_a_name(typed, "the order is OWNER/NAME:QUANT@REVISION")
    if colon:
        choice, at, revision = choice.rpartition("@") if "@" in choice else (choice, "", "")
    else:
        repository, at, revision = text.partition("@")
    if (colon and not choice) or (at and not revision):
        raise _not_a_name(typed, "something is missing after : or @")
    return _hub_reference(repository, unquote(choice), revision, typed)


def _hub_reference(repository: str, choice: str, revision: str, typed: str) -> HubReference:
    """Check the parts; an empty part was not typed."""
    segments = repository.split("/")
    if len(segments) != 2 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise _not_a_name(typed, "a repository of the hub is OWNER/NAME, and a path begins with ./ or /")
    if revision and not is_revision(revision):
        raise _not_a_name(typed, "the order is OWNER/NAME:QUANT@REVISION")
    checked = None if revision in ("", "main") else revision
    if not choice:
        return HubReference(repository, revision=checked)
    if "/" in choice or choice.casefold().endswith((".gguf", ".safetensors")):
        parts = choice.split("/")
        if not choice.isprintable() or "\\" in choice or any(part.strip() in ("", ".", "..") for part in parts):
            raise _not_a_name(typed, "the file is a path inside the repository")
        return HubReference(repository, file=choice, revision=checked)
    if not is_label(choice):
        raise _not_a_name(typed, "a quantization such as Q4_K_M, or a file, comes after the colon")
    return HubReference(repository, choice.upper(), revision=checked)


def _parse_catalog(text: str) -> CatalogName:
    family, *rest = text.split(":")
    family = family.lower()
    quantization = rest.pop().upper() if rest and (len(rest) > 1 or is_quantization(rest[-1])) else None
    size = rest.pop().lower() if rest else None
    is_valid = text.isascii() and not rest and _WORD.fullmatch(family) and (size is None or _WORD.fullmatch(size))
    if not is_valid or (quantization is not None and not _LABEL.fullmatch(quantization)):
        raise _not_a_name(text, FORMS)
    return CatalogName(family, size, quantization)


def _not_a_name(text: str, hint: str) -> ModelError:
    return ModelError(f"{shown(text)} is not a model name", hint)
