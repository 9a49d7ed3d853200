"""Which files of a repository a name means: one model, whole, and nothing twice.

    a quantization      its GGUF, or all parts of a split one
    a file              that file; of a split GGUF, or of sharded safetensors, all of them and what belongs to them
    nothing             the usual quantization of a GGUF repository, or the safetensors folder with tokenizer and config

Owns that choice, and the lines that say what there is instead. Works on names and sizes: the hub's, or those on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgelm.errors import ModelError
from edgelm.library.files import CONFIG, PART, GGUFFiles, group_ggufs
from edgelm.library.names import HubReference
from edgelm.library.units import size_text

# As good as Q4_K_M or nearly so, then what is still small, then what is larger than needed.
PREFERRED = (
    "Q4_K_M UD-Q4_K_XL Q4_K_L Q4_K_S MXFP4_MOE MXFP4 Q4_1 Q4_0 IQ4_NL IQ4_XS Q5_K_M UD-Q5_K_XL Q5_K_S Q6_K UD-Q6_K_XL "
    "Q8_0 UD-Q8_K_XL Q3_K_L Q3_K_M UD-Q3_K_XL Q3_K_S IQ3_M IQ3_S Q2_K TQ2_0 BF16 F16 F32"
).split()
SHARD = re.compile(r"(?P<stem>model(?:\.\w+)?)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BESIDE = re.compile(  # what transformers and our reader take from such a folder, and what says whose it is
    r"(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|tokenizer\.model|[\w.-]*\.tiktoken|[\w-]*\.spm|merges\.txt|vocab\.txt|chat_template\.jinja"
    r"|additional_chat_templates/[\w.-]+\.jinja|README\.md|(?:LICEN[CS]E|NOTICE|USE_POLICY)(?:\.\w+)?",
    re.IGNORECASE,
)
MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of one model; `main` is what is run: the first GGUF, or a folder, which is the empty text."""

    files: tuple[str, ...]
    main: str
    quantization: str | None = None


def select_files(reference: HubReference, sizes: Mapping[str, int]) -> Selection:
    """Return the files that a reference means among those of its repository, whose sizes are in bytes.

    Raises ModelError where there is none, where a part is missing, or where it could be several.
    """
    groups = group_ggufs(sizes)
    if reference.file is not None:
        return _by_file(reference, groups, sizes)
    if reference.quantization is not None:
        return _by_quantization(reference, groups, sizes)
    if groups:
        return _gguf(reference, _preferred(reference, groups, sizes))
    if _weights(sizes):
        return _folder(reference, sizes)
    raise ModelError(f"{reference.repository} holds no model that edgelm reads", _what_there_is(sizes))


def _by_file(reference: HubReference, groups: list[GGUFFiles], sizes: Mapping[str, int]) -> Selection:
    wanted = reference.file or ""
    found = [path for path in sizes if path == wanted] or [path for path in sizes if path.rpartition("/")[2] == wanted]
    if len(found) != 1:
        what = "several files named" if found else "no file"
        raise ModelError(f"{reference.repository} has {what} {wanted}", _what_there_is(sizes))
    for group in groups:
        if found[0] in group.files:
            return _gguf(reference, group)
    if found[0] in (*_weights(sizes), INDEX):
        return _folder(reference, sizes)
    return Selection((found[0],), found[0])


def _by_quantization(reference: HubReference, groups: list[GGUFFiles], sizes: Mapping[str, int]) -> Selection:
    wanted = (reference.quantization or "").upper()
    if not groups:
        raise ModelError(f"{reference.repository} has no GGUF, so no {wanted}", _what_there_is(sizes))
    for label in (wanted, f"UD-{wanted}"):
        matching = [group for group in groups if (group.quantization or "") == label]
        if matching:
            return _gguf(reference, _only(reference, matching))
    there = [group for group in groups if wanted.casefold() in (group.stem.casefold(), group.first.casefold())]
    if there:
        return _gguf(reference, _only(reference, there))
    labels = sorted({group.quantization or group.first for group in groups}, key=_rank)
    raise ModelError(f"{reference.repository} has no {wanted}", f"it has {_several(labels)}")


def _preferred(reference: HubReference, groups: list[GGUFFiles], sizes: Mapping[str, int]) -> GGUFFiles:
    best = min(_rank(group.quantization or "") for group in groups)
    if best == len(PREFERRED):  # labels that nobody ranks: the largest is the closest to the original
        return max(groups, key=lambda group: sum(sizes[file] for file in group.files))
    return _only(reference, [group for group in groups if _rank(group.quantization or "") == best])


def _rank(label: str) -> int:
    return PREFERRED.index(label) if label in PREFERRED else len(PREFERRED)


def _only(reference: HubReference, groups: list[GGUFFiles]) -> GGUFFiles:
    """Return the one group, the one nearest to the root; never guess between models."""
    depth = min(group.first.count("/") for group in groups)
    nearest = [group for group in groups if group.first.count("/") == depth]
    if len(nearest) > 1:
        files = _several([group.first for group in nearest])
        message = f"{reference.repository} has {len(nearest)} models that this could mean"
        raise ModelError(message, f"name one of its files, {reference.repository}:FILE, of {files}")
    return nearest[0]


def _gguf(reference: HubReference, group: GGUFFiles) -> Selection:
    if part := PART.fullmatch(group.first):
        _require_all(reference, group.files, part["stem"], int(part["count"]), "gguf")
    return Selection(group.files, group.first, group.quantization)


def _folder(reference: HubReference, sizes: Mapping[str, int]) -> Selection:
    weights = _weights(sizes)
    if CONFIG not in sizes:
        message = f"{reference.repository} has {weights[0]}, but no {CONFIG}: perhaps an adapter, or no language model"
        raise ModelError(message, "take the repository of a whole model")
    if shard := SHARD.fullmatch(weights[0]):
        _require_all(reference, weights, shard["stem"], int(shard["count"]), "safetensors")
        if INDEX in sizes:
            weights = (*weights, INDEX)
    beside = sorted(path for path in sizes if BESIDE.fullmatch(path) and path not in weights)
    return Selection((*weights, *beside), "")


def _weights(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the safetensors at the root: the shards, or the one file; never both, never another format's copy."""
    shards: dict[tuple[str, str], list[str]] = {}
    for path in sorted(sizes):
        if match := SHARD.fullmatch(path):
            shards.setdefault((match["stem"], match["count"]), []).append(path)
    plain = [files for (stem, _), files in shards.items() if stem == "model"]
    if plain and (INDEX in sizes or WHOLE not in sizes):
        return tuple(plain[0])
    if WHOLE in sizes:
        return (WHOLE,)
    alone = [path for path in sorted(sizes) if path.endswith(".safetensors") and "/" not in path]
    return tuple(alone) if len(alone) == 1 else ()


def _require_all(reference: HubReference, files: Iterable[str], stem: str, count: int, ending: str) -> None:
    wanted = [f"{stem}-{number:05d}-of-{count:05d}.{ending}" for number in range(1, count + 1)]
    missing = sorted(set(wanted) - set(files))
    if missing or not wanted:
        message = f"{reference.repository} lacks {_several(missing)} of {count} parts"
        raise ModelError(message, "its author has not put all of them there: take another repository")


def _what_there_is(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return "it is empty"
    largest = sorted(sizes, key=lambda path: (-sizes[path], path))
    return "it has " + _several([f"{path} ({size_text(sizes[path])})" for path in largest])


def _several(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
