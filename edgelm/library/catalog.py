"""The catalogue: short names of popular models, each with its repository, size, licence and purpose.

Owns `catalog.toml`, and the suggestions for misspelt names. Knows neither the network nor the disk.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from edgelm.base.errors import ModelError
from edgelm.library.names import CatalogName, HubReference, LocalPath, StarterName, is_quantization, parse_name

FILE = "catalog.toml"
EntryKind = Literal["text", "embedding", "rerank"]

MIN_PARAMETERS, MAX_PARAMETERS = 2 * 10**7, 10**12
MIN_CONTEXT = {"text": 2048, "embedding": 512, "rerank": 512}
MAX_NEAR = 3
FIRST_CHAT = "smollm2:135m-q4_1"  # what a first chat is offered: it needs no hub (packages.py)
SHORT_NAMES = ("smollm2", "smollm2:135m")  # a pull of these fetches FIRST_CHAT where the hub cannot be reached
WORKSPACE_BYTES = 5 * 10**8  # beside the weights: a small KV cache and compute buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the catalogue. The numbers hold for the default quantization; `nbytes` is approximate."""

    family: str
    size: str
    repository: str
    quantization: str
    parameters: int
    nbytes: int
    context: int
    licence: str  # an SPDX id, or a name
    gated: bool
    architecture: str  # llama.cpp's name
    good_at: str
    is_default: bool  # the family's name alone means this size
    kind: EntryKind = "text"  # it writes text, or computes vectors only, or ranks documents only

    @property
    def name(self) -> str:
        return f"{self.family}:{self.size}"

    def reference(self, quantization: str | None = None) -> HubReference:
        """Return the model's place on the hub, in the default quantization or another one."""
        return HubReference(self.repository, quantization or self.quantization)


def find_entry(name: CatalogName, typed: str = "") -> Entry:
    """Return the entry with this name. Raises ModelError, which lists the family's sizes or similar names.

    `typed` is the name in the user's letters.
    """
    family = [entry for entry in entries() if entry.family == name.family]
    for entry in family:
        if entry.size == name.size or (name.size is None and entry.is_default):
            return entry
    if family:
        sizes = ", ".join(entry.name for entry in family)
        raise ModelError(f"the catalogue has no {name.family} of size {name.size}", f"it has {sizes}")
    near = near_names(str(name))
    hint = f"did you mean {' or '.join(near)}?" if near else "`edgelm pull` shows all names"
    raise ModelError(f"there is no model {typed or name}", hint)


def needed_bytes(entry: Entry) -> int:
    """Estimate the least memory that a model takes."""
    return entry.nbytes + WORKSPACE_BYTES


def near_names(text: str, more: Iterable[str] = ()) -> list[str]:
    """Return the names of the catalogue, and of `more`, that resemble a text; the most similar first."""
    typed = text.casefold()
    names = {entry.family: entry.name for entry in entries() if entry.is_default}
    names |= {entry.name: entry.name for entry in entries()}
    here = list(more)
    names |= {name.casefold().removeprefix("ollama:").partition(":")[0]: name for name in here}
    names |= {name.casefold(): name for name in here}
    longer = [name for key, name in names.items() if len(typed) > 2 and key.startswith(typed)]
    similar = [names[key] for key in difflib.get_close_matches(typed, names, MAX_NEAR, cutoff=0.65)]
    return [*dict.fromkeys(similar + longer)][:MAX_NEAR]


def hub_reference(text: str) -> HubReference:
    """Parse a name of the catalogue or of a hub repository.

    Raises ModelError for an invalid name, a name that the catalogue lacks, the starter, and a path on this machine.
    """
    reference = parse_name(text)
    if isinstance(reference, StarterName):
        raise ModelError("the starter comes with edgelm", "`edgelm run starter` runs it")
    if isinstance(reference, LocalPath):
        raise ModelError(f"{reference} is a path on this machine", "name a model of the catalogue, or OWNER/NAME")
    if isinstance(reference, CatalogName):
        return find_entry(reference).reference(reference.quantization)
    return reference


def stand_in(name: str) -> HubReference | None:
    """Return the model that a pull of a short name fetches where the hub cannot be reached; None: there is none."""
    return hub_reference(FIRST_CHAT) if name.strip().casefold() in SHORT_NAMES else None


def entry_of(repository: str) -> Entry | None:
    """Return the entry of a hub repository."""
    return _by_repository().get(repository.casefold())


def name_of(repository: str, quantization: str | None) -> str | None:
    """Return the shortest catalogue name for a quantization of a repository, None if the catalogue lacks it."""
    entry = entry_of(repository)
    if entry is None or quantization is None:
        return None
    return entry.name if quantization.upper() == entry.quantization else f"{entry.name}:{quantization.upper()}"


@cache
def entries() -> tuple[Entry, ...]:
    """Return all entries, in the order of the file."""
    text = files("edgelm.library").joinpath(FILE).read_text(encoding="utf-8")
    all_entries = [entry for family, fields in tomllib.loads(text).items() for entry in _family(family, fields)]
    assert len({entry.name for entry in all_entries}) == len(all_entries), "names must be unique"
    assert len({entry.repository for entry in all_entries}) == len(all_entries), "repositories must be unique"
    return tuple(all_entries)


@cache
def _by_repository() -> dict[str, Entry]:
    return {entry.repository.casefold(): entry for entry in entries()}


def _family(family: str, fields: dict[str, Any]) -> list[Entry]:
    sizes, default = fields.pop("sizes"), fields.pop("default")
    members = [_entry(family, default, fields | size) for size in sizes]
    assert sum(entry.is_default for entry in members) == 1, f"{family}: the default must be one of the sizes"
    return members


def _entry(family: str, default: str, fields: dict[str, Any]) -> Entry:
    billions, gigabytes = fields.pop("parameters"), fields.pop("gb")
    entry = Entry(
        family=family,
        parameters=round(billions * 1e9),
        nbytes=round(gigabytes * 1e9),
        is_default=fields["size"] == default,
        gated=fields.pop("gated", False),
        **fields,
    )
    assert parse_name(entry.name) == CatalogName(family, entry.size), entry.name
    assert parse_name(str(entry.reference())) == entry.reference(), entry.name
    assert is_quantization(entry.quantization), entry.name
    assert MIN_PARAMETERS < entry.parameters < MAX_PARAMETERS, entry.name
    assert 0.3 < entry.nbytes / entry.parameters < 4.3, f"{entry.name}: bytes for each parameter"
    assert entry.context >= MIN_CONTEXT[entry.kind], entry.name
    assert all((entry.licence, entry.architecture, entry.good_at)), entry.name
    return entry
