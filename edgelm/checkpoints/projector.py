"""The projector of a model, as llama.cpp's libmtmd reads it: a GGUF with the part that turns a picture into vectors.

Owns the checks of its header before native code reads it, whether it belongs to a model, and the memory that it takes.
Knows nothing of pictures, and of where the file is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import NO_WEIGHTS, TENSOR_ALIGNMENT
from edgelm.checkpoints.summary import ModelSummary, quantization
from edgelm.checkpoints.values import Values, is_number

ENCODERS = ("v.", "a.")  # tensors of the parts before the projection
MAX_SIDE = 16_384  # pixels of the picture that a projector is made for
MAX_SIZE = 2**20
F32_BYTES = 4
ANOTHER = "use the projector that was published with the model: `edgelm pull` takes it along"


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """A projector that reads pictures."""

    path: Path
    kind: str  # llama.cpp's name, such as gemma3
    quantization: str
    nbytes: int
    widths: frozenset[int]  # of its vectors, as far as the header tells: the model's hidden size is among them
    image_size: int  # pixels of a side; larger for projectors that take any size
    patch_size: int
    activations: int  # floats of one patch that are live at once

    @property
    def memory_bytes(self) -> int:
        """Estimate of the memory beside the model: the weights, and the activations of one picture."""
        patches = (self.image_size // self.patch_size) ** 2
        return self.nbytes + F32_BYTES * patches * self.activations

    def document(self) -> dict[str, object]:
        """Return the JSON document for scripts."""
        return {"path": str(self.path), "kind": self.kind, "quantization": self.quantization, "bytes": self.nbytes}


def read_projector(path: Path) -> Projector:
    """Read and check the header of a projector. Raises ModelError for another file, and for one that cannot work."""
    with open_gguf(path) as gguf:
        _require_projector(gguf)
        vision = Values(gguf.metadata, gguf.name, prefix="clip.vision.")
        width = vision.integer("embedding_length", low=1, high=MAX_SIZE)
        heads = vision.integer("attention.head_count", low=1, high=MAX_SIZE, default=1)
        if width % heads:
            raise vision.damaged(f"its width is {width:,}, which {heads:,} heads cannot share")
        vision.integer("block_count", low=0, high=4096)
        _check_numbers(vision)
        _check_tensors(gguf)
        widths = {vision.integer("projection_dim", low=0, high=MAX_SIZE, default=0)}
        for name, tensor in gguf.tensors.items():
            widths.update(() if name.startswith(ENCODERS) else tensor.shape)
        side = vision.integer("image_size", low=1, high=MAX_SIDE)
        patch = vision.integer("patch_size", low=1, high=side)
        feed_forward = vision.integer("feed_forward_length", high=MAX_SIZE, default=4 * width)
        kind = gguf.metadata.get("clip.vision.projector_type") or gguf.metadata.get("clip.projector_type")
        return Projector(
            path=path,
            kind=shown(kind, 40) if isinstance(kind, str) else "mlp",  # the default of llama.cpp
            quantization=quantization(gguf),
            nbytes=gguf.size,
            widths=frozenset(widths),
            image_size=side,
            patch_size=patch,
            activations=6 * width + feed_forward,
        )


def require_fit(projector: Projector, model: ModelSummary) -> None:
    """Raise ModelError for the projector of another model, whose vectors have another length."""
    if model.width not in projector.widths:
        name = shown(projector.path.name)
        message = (
            f"{name} is the projector of another model: {shown(model.name)} takes vectors of {model.width:,} numbers"
        )
        raise ModelError(f"{message}, and none of its tensors has that size", ANOTHER)


def _require_projector(gguf: GGUF) -> None:
    if gguf.metadata.get("general.architecture") != "clip":
        raise ModelError(f"{gguf.name} is not a projector", "name the file mmproj-….gguf of the model")
    if len(gguf.paths) > 1:
        raise ModelError(f"{gguf.name} is split, and llama.cpp reads a projector from one file", "merge its parts")
    flags = [gguf.metadata.get(f"clip.has_{part}_encoder") for part in ("vision", "audio")]
    if not flags[0]:
        what = "sound, not pictures" if flags[1] else "no pictures"
        raise ModelError(f"{gguf.name} is a projector that reads {what}", "--mmproj off goes without it")


def _check_numbers(vision: Values) -> None:
    """Check what the encoder divides by, and every fraction: NaN spreads to all vectors of a picture."""
    epsilon = vision.number("attention.layer_norm_epsilon", default=1e-6)
    if not 0 <= epsilon <= 1:
        raise vision.damaged(f"its epsilon is {epsilon:g}, but must be 0 to 1")
    for name in ("image_mean", "image_std"):
        entries = vision.entries(name)
        if entries and (len(entries) < 3 or not all(is_number(entry) for entry in entries)):
            raise vision.damaged(f"clip.vision.{name} is not three numbers")
        if name == "image_std" and any(entry <= 0 for entry in entries):
            raise vision.damaged("clip.vision.image_std has a number that is not above 0")
    for name in ("spatial_merge_size", "projector.scale_factor", "n_merge"):
        vision.integer(name, low=1, high=64, default=1)


def _check_tensors(gguf: GGUF) -> None:
    if not gguf.tensors:
        raise ModelError(f"{gguf.name} holds no tensors", "download it again")
    for tensor in gguf.tensors.values():
        if tensor.offset % TENSOR_ALIGNMENT:
            raise gguf.values.damaged(f"tensor {shown(tensor.name)} is not aligned to {TENSOR_ALIGNMENT} bytes")
        if tensor.type.name in NO_WEIGHTS or not math.prod(tensor.shape):
            raise gguf.values.damaged(f"tensor {shown(tensor.name)} is {tensor.type.name}, not a type for weights")
