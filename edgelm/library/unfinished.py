"""Downloads that were not finished: what came of them, in the hub's cache, where no snapshot leads to it.

    blobs/<hash>.part         the bytes, as transfer.py writes them
    blobs/<hash>.part.path    which file of the repository they are; without it, only a pull can tell
    blobs/<hash>.part.etag    what their sender calls this version

Owns how they are found, named and freed. Takes none away that a pull holds at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgelm.errors import EdgeLMError
from edgelm.library.catalog import find_entry, name_of
from edgelm.library.files import quantization_of
from edgelm.library.hub_cache import Repository, names_in, repositories
from edgelm.library.names import CatalogName, HubReference, Reference

PART = ".part"
BESIDE = (".path", ".etag")  # behind the name of a part
MAX_PATH_BYTES = 4096
LOCK_S = 0.05


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What came of one file. `file` is its path inside the repository, None where that is not known."""

    repository: str  # OWNER/NAME
    part: Path
    file: str | None
    nbytes: int

    @property
    def name(self) -> str:
        """What `edgelm pull` continues it by, as far as is known."""
        if self.file is None or not self.file.casefold().endswith(".gguf"):
            return self.repository
        label = quantization_of(self.file)
        if label is None:
            return str(HubReference(self.repository, file=self.file))
        return name_of(self.repository, label) or str(HubReference(self.repository, label))


def all_unfinished(hub: Path) -> list[Unfinished]:
    """Return what there is in a cache, by repository."""
    return [each for repository in repositories(hub) for each in unfinished_in(repository)]


def unfinished_in(repository: Repository) -> tuple[Unfinished, ...]:
    """Return what there is of one repository, by the file's name."""
    blobs = repository.path / "blobs"
    parts = [blobs / name for name in names_in(blobs, []) if name.endswith(PART)]
    found = [Unfinished(repository.name, part, _path_of(part), _size(part)) for part in parts]
    return tuple(sorted(found, key=lambda each: (each.file or "", each.part)))


def meant_by(reference: Reference, hub: Path) -> list[Unfinished]:
    """Return what there is of a model: of a quantization if the name has or means one, or of the whole repository."""
    if isinstance(reference, CatalogName):
        reference = find_entry(reference).reference(reference.quantization)
    if not isinstance(reference, HubReference) or reference.revision is not None:
        return []  # of which revision the bytes are, nobody knows
    return [each for each in all_unfinished(hub) if _is_of(each, reference)]


def free_unfinished(wanted: Iterable[Unfinished], hub: Path) -> list[Unfinished]:
    """Delete what came, under the hub's locks; return what was deleted: all but what a pull holds.

    Raises EdgeLMError where it may not be deleted.
    """
    return [each for each in wanted if _free(each, hub)]


def _free(unfinished: Unfinished, hub: Path) -> bool:
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    part = unfinished.part
    lock = hub / ".locks" / part.parents[1].name / f"{part.name.removesuffix(PART)}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock, timeout=LOCK_S):
            for path in (*(part.with_name(part.name + ending) for ending in BESIDE), part):
                path.unlink(missing_ok=True)
    except Timeout:
        return False
    except OSError as error:
        message = f"{error.filename or part} cannot be removed: {error.strerror}"
        raise EdgeLMError(message, "change the permissions and try again") from None
    return True


def _is_of(unfinished: Unfinished, reference: HubReference) -> bool:
    if unfinished.repository.casefold() != reference.repository.casefold():
        return False
    if reference.file is not None:
        return unfinished.file is not None and reference.file in (unfinished.file, unfinished.file.rpartition("/")[2])
    if reference.quantization is None or unfinished.file is None:
        return True
    return quantization_of(unfinished.file) in (reference.quantization, f"UD-{reference.quantization}")


def _path_of(part: Path) -> str | None:
    with suppress(OSError, ValueError), part.with_name(part.name + ".path").open("rb") as file:
        text = file.read(MAX_PATH_BYTES).decode()
        return text if text and text.isprintable() else None
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
