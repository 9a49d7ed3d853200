"""The files of a model, by their names: GGUFs and their shards, safetensors folders, and which files a name selects.

    a quantization      its GGUF, or all shards of a split one
    a file              that file; for a shard, all shards and the files that belong to them
    nothing             the usual quantization of a GGUF repository, or the safetensors folder with tokenizer and config

Owns that choice, and the error lines that list the alternatives. Works on names and sizes, of the hub or of the disk.
Opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edgelm.base.errors import ModelError
from edgelm.library.names import QUANTIZATION, HubReference

GGUF_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.IGNORECASE)
AUXILIARY = re.compile(  # read with a model, not alone
    r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)|^(?:mtp|eagle3|dflash|dspark)-", re.IGNORECASE
)
HEADS = re.compile(r"^mtp-", re.IGNORECASE)  # the layers of a model that draft; a whole model may have MTP in its name
PROJECTOR = re.compile(r"(?:^|[-._])mmproj(?:[-._]|$)", re.IGNORECASE)  # the part of a model that reads pictures
PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")  # the best first: it is small, and llama.cpp is fastest with F16
_LABEL = re.compile(rf"(?:^|[-._])({QUANTIZATION})(?=[-.]|$)", re.IGNORECASE | re.ASCII)

# The labels about as good as Q4_K_M come first, then the smaller ones, then those larger than needed.
PREFERRED = (
    "Q4_K_M UD-Q4_K_XL Q4_K_L Q4_K_S MXFP4_MOE MXFP4 Q4_1 Q4_0 IQ4_NL IQ4_XS Q5_K_M UD-Q5_K_XL Q5_K_S Q6_K UD-Q6_K_XL "
    "Q8_0 UD-Q8_K_XL Q3_K_L Q3_K_M UD-Q3_K_XL Q3_K_S IQ3_M IQ3_S Q2_K TQ2_0 BF16 F16 F32"
).split()
SHARD = re.compile(r"(?P<stem>model(?:\.\w+)?)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BESIDE = re.compile(  # files that transformers and our reader use beside the weights, and the licence
    r"(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|tokenizer\.model|[\w.-]*\.tiktoken|[\w-]*\.spm|merges\.txt|vocab\.txt|chat_template\.jinja"
    r"|additional_chat_templates/[\w.-]+\.jinja|modules\.json|\d_\w+/config\.json|README\.md|(?:LICEN[CS]E|NOTICE|USE_POLICY)(?:\.\w+)?",
    re.IGNORECASE,
)
ADAPTER = frozenset({"adapter_config.json", "adapter_model.safetensors"})  # LoRA, as PEFT writes it
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
MAX_NAMED = 12


class GGUFFiles(NamedTuple):
    """A GGUF model: its first file and all its files, as named by the caller."""

    first: str
    files: tuple[str, ...]

    @property
    def quantization(self) -> str | None:
        """The label in the file name, upper case."""
        return quantization_of(self.first)

    @property
    def stem(self) -> str:
        """The file name without folder, shard number and suffix."""
        return _stem(self.first)


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of one model; `main` is the one to run: the first GGUF, or "" for the folder itself."""

    files: tuple[str, ...]
    main: str
    quantization: str | None = None
    projector: str | None = None  # beside `files`: the part that reads pictures
    heads: str | None = None  # beside `files`: the layers that draft


def group_ggufs(names: Iterable[str]) -> list[GGUFFiles]:
    """Group paths (with slashes) into models, all shards of one together; skip projectors, heads and the like."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        if not name.casefold().endswith(".gguf") or AUXILIARY.search(_last(name)):
            continue
        shard = GGUF_SHARD.fullmatch(name)
        groups.setdefault((shard["stem"], shard["count"]) if shard else (name, ""), []).append(name)
    return [GGUFFiles(group[0], tuple(group)) for group in groups.values()]


def quantization_of(name: str) -> str | None:
    """Return the last quantization label in a file name, upper case."""
    labels = _LABEL.findall(_stem(name))
    return str(labels[-1]).upper() if labels else None


def is_projector(name: str) -> bool:
    """Return whether a file is the part of a model that reads pictures, by its name."""
    return name.casefold().endswith(".gguf") and PROJECTOR.search(_last(name)) is not None


def projector_among(names: Iterable[str], model: str, *, one_family: bool) -> str | None:
    """Return the projector of a GGUF among the paths beside it: the one with its name, else one that has no other's.

    `one_family`: all models beside it are the same one in other quantizations, or share a projector.
    """
    return min(_beside(names, model, is_projector, one_family=one_family), key=_projector_rank, default=None)


def heads_among(names: Iterable[str], model: str, *, one_family: bool) -> str | None:
    """Return the file of a GGUF's heads among the paths beside it, found as a projector is.

    The model's own quantization comes first, then the usual order.
    """
    label = quantization_of(model)

    def rank(name: str) -> tuple[bool, int, int, str]:
        return quantization_of(name) != label, _rank(quantization_of(name) or ""), name.count("/"), name

    return min(_beside(names, model, is_heads, one_family=one_family), key=rank, default=None)


def is_heads(name: str) -> bool:
    """Return whether a file has only the layers of a model that draft, by its name."""
    return name.casefold().endswith(".gguf") and HEADS.search(_last(name)) is not None


def is_companion(name: str) -> bool:
    """Return whether a file is pulled with a model, whose name says nothing of it."""
    return is_projector(name) or is_heads(name)


def _beside(names: Iterable[str], model: str, is_one: Callable[[str], bool], *, one_family: bool) -> list[str]:
    """Return the files of a kind that have the model's name, or where none has it, no other model's."""
    names = list(names)
    candidates = list(filter(is_one, names))
    base, others = _base(model), {_base(group.first) for group in group_ggufs(names)}
    own = [name for name in candidates if _base(name) == base]
    if own:
        return own
    others.discard(base)
    return [name for name in candidates if _base(name) not in others] if one_family or not others else []


def _projector_rank(name: str) -> tuple[int, int, str]:
    label = quantization_of(name)
    rank = PROJECTOR_TYPES.index(label) if label in PROJECTOR_TYPES else len(PROJECTOR_TYPES)
    return rank, name.count("/"), name


def _base(name: str) -> str:
    """Return the name of a model in a file name: without its quantization and the words around it."""
    words = re.split(r"[-._]", _LABEL.sub("", _stem(name)).casefold())
    return "-".join(word for word in words if word not in ("", "mmproj", "mtp", "model"))


def is_safetensors_folder(names: Iterable[str]) -> bool:
    """Return whether a folder with these files is a model that transformers would load."""
    names = set(names)
    return CONFIG in names and any(name.endswith(".safetensors") for name in names)


def select_files(reference: HubReference, sizes: Mapping[str, int]) -> Selection:
    """Return the files that a reference selects in its repository, whose file sizes are in bytes.

    Raises ModelError if no model matches, a shard is missing, or several models match.
    """
    groups = group_ggufs(sizes)
    if reference.file is not None:
        return _by_file(reference, groups, sizes)
    if reference.quantization is not None:
        return _by_quantization(reference, groups, sizes)
    if groups:
        return _gguf(reference, _preferred(reference, groups, sizes), sizes)
    if ADAPTER.issubset(sizes) and not (CONFIG in sizes and _weights(sizes)):
        beside = sorted(path for path in sizes if BESIDE.fullmatch(path) and path != CONFIG)
        return Selection((*sorted(ADAPTER), *beside), "")
    if _weights(sizes):
        return _folder(reference, sizes)
    if pickled := [path for path in sizes if path.endswith(PICKLED)]:
        message = f"{reference.repository} has only pickled weights ({_joined(pickled)}), which can run code"
        raise ModelError(message, "choose a repository with the model as safetensors or GGUF")
    raise ModelError(f"{reference.repository} has no model that edgelm can read", _contents(sizes))


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _stem(name: str) -> str:
    last = _last(name)
    shard = GGUF_SHARD.fullmatch(last)
    return shard["stem"] if shard else last[: -len(".gguf")] if last.casefold().endswith(".gguf") else last


def _by_file(reference: HubReference, groups: list[GGUFFiles], sizes: Mapping[str, int]) -> Selection:
    name = reference.file or ""
    paths = [path for path in sizes if path == name] or [path for path in sizes if _last(path) == name]
    if len(paths) != 1:
        count = "several files named" if paths else "no file"
        raise ModelError(f"{reference.repository} has {count} {name}", _contents(sizes))
    for group in groups:
        if paths[0] in group.files:
            return _gguf(reference, group, sizes)
    if paths[0] in (*_weights(sizes), INDEX):
        return _folder(reference, sizes)
    return Selection((paths[0],), paths[0])


def _by_quantization(reference: HubReference, groups: list[GGUFFiles], sizes: Mapping[str, int]) -> Selection:
    label = (reference.quantization or "").upper()
    if not groups:
        raise ModelError(f"{reference.repository} has no GGUF, so no {label}", _contents(sizes))
    for spelling in (label, f"UD-{label}"):
        matches = [group for group in groups if (group.quantization or "") == spelling]
        if matches:
            return _gguf(reference, _only(reference, matches), sizes)
    matches = [group for group in groups if label.casefold() in (group.stem.casefold(), group.first.casefold())]
    if matches:
        return _gguf(reference, _only(reference, matches), sizes)
    labels = sorted({group.quantization or group.first for group in groups}, key=_rank)
    raise ModelError(f"{reference.repository} has no {label}", f"it has {_joined(labels)}")


def _preferred(reference: HubReference, groups: list[GGUFFiles], sizes: Mapping[str, int]) -> GGUFFiles:
    best = min(_rank(group.quantization or "") for group in groups)
    if best == len(PREFERRED):  # no known label: the largest is the closest to the original
        return max(groups, key=lambda group: sum(sizes[file] for file in group.files))
    return _only(reference, [group for group in groups if _rank(group.quantization or "") == best])


def _rank(label: str) -> int:
    return PREFERRED.index(label) if label in PREFERRED else len(PREFERRED)


def _only(reference: HubReference, groups: list[GGUFFiles]) -> GGUFFiles:
    """Return the one group, or the one nearest to the root; never guess between models."""
    depth = min(group.first.count("/") for group in groups)
    nearest = [group for group in groups if group.first.count("/") == depth]
    if len(nearest) > 1:
        files = _joined([group.first for group in nearest])
        message = f"{reference.repository} has {len(nearest)} models that match"
        raise ModelError(message, f"name one of its files, {reference.repository}:FILE, of {files}")
    return nearest[0]


def _gguf(reference: HubReference, group: GGUFFiles, sizes: Mapping[str, int]) -> Selection:
    if shard := GGUF_SHARD.fullmatch(group.first):
        _require_all(reference, group.files, shard["stem"], int(shard["count"]), "gguf")
    projector = projector_among(sizes, group.first, one_family=True)
    heads = heads_among(sizes, group.first, one_family=True)
    return Selection(group.files, group.first, group.quantization, projector, heads)


def _folder(reference: HubReference, sizes: Mapping[str, int]) -> Selection:
    weights = _weights(sizes)
    if CONFIG not in sizes:
        message = (
            f"{reference.repository} has {weights[0]}, but no {CONFIG}: perhaps an adapter, or not a language model"
        )
        raise ModelError(message, "choose the repository of a whole model")
    if shard := SHARD.fullmatch(weights[0]):
        _require_all(reference, weights, shard["stem"], int(shard["count"]), "safetensors")
        if INDEX in sizes:
            weights = (*weights, INDEX)
    beside = sorted(path for path in sizes if BESIDE.fullmatch(path) and path not in weights)
    return Selection((*weights, *beside), "")


def _weights(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the safetensors at the root: the shards or the single file, never both, never another format's copy."""
    shards: dict[tuple[str, str], list[str]] = {}
    for path in sorted(sizes):
        if match := SHARD.fullmatch(path):
            shards.setdefault((match["stem"], match["count"]), []).append(path)
    plain = [files for (stem, _), files in shards.items() if stem == "model"]
    if plain and (INDEX in sizes or SINGLE_FILE not in sizes):
        return tuple(plain[0])
    if SINGLE_FILE in sizes:
        return (SINGLE_FILE,)
    others = [path for path in sorted(sizes) if path.endswith(".safetensors") and "/" not in path]
    return tuple(others) if len(others) == 1 else ()


def _require_all(reference: HubReference, files: Iterable[str], stem: str, count: int, suffix: str) -> None:
    shards = [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]
    missing = sorted(set(shards) - set(files))
    if missing or not shards:
        message = f"{reference.repository} lacks {_joined(missing)} of {count} shards"
        raise ModelError(message, "its author has not uploaded all of them: choose another repository")


def _contents(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return "it is empty"
    from edgelm.library.progress import size_text  # only an error names sizes

    largest = sorted(sizes, key=lambda path: (-sizes[path], path))
    return "it has " + _joined([f"{path} ({size_text(sizes[path])})" for path in largest])


def _joined(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
