"""A folder of safetensors, quantized to packed INT4 layer by layer.

Owns the checks before anything is written, the order of the work, and what is stored as it is. Runs in a worker. Each
finished layer is read back from its file by the engine's own reader, and the next layer sees its results.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgelm.backends.torch.build import tokenizer_of_folder
from edgelm.base.disk import require_space
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.workers.messages import Note
from edgelm.checkpoints.config_json import CONFIG, read_config_json
from edgelm.checkpoints.files import file_identity
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.safetensors import Safetensors, open_safetensors
from edgelm.making.quantization.activations import Calibration, dense
from edgelm.making.quantization.calibration import calibration_text
from edgelm.making.quantization.int4 import Codes, Int4Format, packed
from edgelm.making.quantization.int4_folder import Stored, UnfinishedFolder, quantization_config
from edgelm.making.quantization.int4_job import Int4Done, Int4Job, Int4Progress
from edgelm.making.quantization.int4_layer import LayerWeights, Place, Site, Statistics, quantize_layer, scale_layer
from edgelm.making.quantization.int4_plan import Plan, plan_folder
from edgelm.models.decoder import Layer
from edgelm.models.loading.decoder import load_layer
from edgelm.models.loading.sources import FolderSource
from edgelm.models.loading.stored import PLAIN_TYPES

VERSION = 1  # of the algorithms: a folder that another version began is begun again
DTYPE_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
}
Send = Callable[[Int4Progress | Note], None]


def quantize_folder(job: Int4Job, send: Send) -> Int4Done:
    """Quantize a folder; `send` takes progress and notes. Raises EdgeLMError."""
    started = time.monotonic()
    config = read_config_json(job.folder) if job.folder.is_dir() else {}
    with open_safetensors(job.folder) as model:
        plan = plan_folder(model, config, job)
        ids = _calibration_ids(job, config, plan, send) if job.method != "int4" else None
        tokens = 0 if ids is None else ids.numel()
        with closing(UnfinishedFolder(job.out, _key(job, model, ids), plan.parts)) as folder:
            require_space(folder.path, plan.nbytes - folder.nbytes(), job.out.name)
            worker = _Quantizer(job, model, plan, config, folder, send)
            worker.run(ids)
            size = folder.finish(model.folder, worker.written_config())
        matrices = sum(len(site.matrices) for sites in plan.sites for site in sites)
        return Int4Done(job.out, model.size, size, matrices, tokens, time.monotonic() - started)


def _key(job: Int4Job, model: Safetensors, ids: Tensor | None) -> dict[str, Any]:
    """Return all that the result depends on."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for part in file_identity([*model.paths, model.folder / CONFIG]):
            digest.update(part)
    except OSError as error:
        raise EdgeLMError(
            f"{model.name} cannot be read: {error.strerror}", "download the model again (edgelm pull --verify MODEL)"
        ) from None
    if ids is not None:
        digest.update(repr(ids.shape).encode() + ids.numpy().tobytes())
    return {"version": VERSION, "method": [job.method, job.group, job.symmetric], "inputs": digest.hexdigest()}


def _calibration_ids(job: Int4Job, config: Mapping[str, Any], plan: Plan, send: Send) -> Tensor:
    """Return token ids [sequences, length] of the text, spread over all of it. Raises EdgeLMError."""
    tokenizer = tokenizer_of_folder(job.folder, config)
    text = calibration_text(job.calibration)
    tokens = tokenizer.encode(text, special=True, bos=False)  # a chat may be written with its marks
    length = min(job.sequence_len, plan.config.context, len(tokens))
    bos = tokenizer.encode("", special=False, bos=True)[: tokenizer.num_before]
    own = length - len(bos)
    if own < 1:
        raise EdgeLMError("the calibration text has no tokens", "give a text of some thousand words (--calibration)")
    num = min(job.sequences, len(tokens) // own)
    if num < job.sequences:
        send(Note(f"the calibration text has {num} sequences of {length} tokens; {job.sequences} are better"))
    step = (len(tokens) - own) // max(num - 1, 1)
    rows = [bos + tokens[k * step : k * step + own] for k in range(num)]
    return torch.tensor(rows, dtype=torch.int32)


class _Quantizer:
    """The work on one folder."""

    def __init__(
        self,
        job: Int4Job,
        model: Safetensors,
        plan: Plan,
        config: Mapping[str, Any],
        folder: UnfinishedFolder,
        send: Send,
    ) -> None:
        self._job = job
        self._model = model
        self._plan = plan
        self._config = config
        self._folder = folder
        self._send = send
        self._source = FolderSource(model, config)
        use_cuda = job.device != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda" if use_cuda else "cpu")
        self._form = Int4Format(job.group, job.symmetric, plan.scale_dtype)
        self._started = time.monotonic()
        self._num_done = 0  # layers of this process

    def written_config(self) -> dict[str, Any]:
        """Return the config.json of the new folder."""
        section = quantization_config(self._job.group, symmetric=self._job.symmetric, ignore=self._plan.ignore)
        config = read_json(self._model.folder / CONFIG)
        return {**config, "quantization_config": section}

    def run(self, ids: Tensor | None) -> None:
        """Write the files of all parts that are not there yet."""
        layers = self._plan.config.layers
        missing = [i for i in range(len(layers)) if not self._folder.has(self._plan.layer_part(i))]
        if self._folder.continued and len(missing) < len(layers):
            self._send(Note(f"continuing after {len(layers) - len(missing)} of {len(layers)} layers"))
        calibration = self._calibration(ids) if ids is not None and missing else None
        for i in range(missing[-1] + 1 if missing else 0):
            if i in missing:
                self._progress(i, "quantizing")
                self._quantize(i, calibration)
                self._num_done += 1
            if calibration is not None and i < missing[-1]:
                self._progress(i, "running the quantized layer")
                calibration.advance(self._written_layer(i, calibration.length))
        for part, tensors in self._plan.other_parts.items():
            if not self._folder.has(part):
                self._folder.write(part, {name: self._as_stored(name) for name in tensors})

    def _calibration(self, ids: Tensor) -> Calibration:
        require_memory(self._plan, ids)
        weight = self._source.matrix(self._plan.embedding)
        return Calibration(self._plan.config, ids, weight, self._device)

    def _quantize(self, i: int, calibration: Calibration | None) -> None:
        """Quantize one layer and write its file."""
        plan = self._plan
        config, sites = plan.config, plan.sites[i]
        statistics: dict[Place, Statistics] = {}
        if calibration is not None:
            self._progress(i, "measuring the inputs")
            layer = load_layer(config, self._source, i, self._device, calibration.length)
            statistics = calibration.observe(dense(layer))
            del layer
            self._progress(i, "quantizing")
            self._note_unused(i, statistics)
        weights = self._layer_weights(i, sites)
        if "awq" in self._job.method:
            scale_layer(weights, config, i, sites, statistics, self._form)
        codes = quantize_layer(weights, sites, statistics, self._form, gptq="gptq" in self._job.method)
        self._folder.write(plan.layer_part(i), self._layer_tensors(i, codes, weights))

    def _layer_weights(self, i: int, sites: list[Site]) -> LayerWeights:
        names = self._plan.layer_names[i]
        sources = {stem: self._plan.sources[stem] for site in sites for stem in site.matrices}
        read: dict[str, Tensor] = {}
        matrices = {}
        for stem, source in sources.items():
            if source.tensor not in read:
                read[source.tensor] = self._source.vector(source.tensor, self._device)
            values = read[source.tensor]
            matrices[stem] = values if source.expert is None else values[source.expert, source.rows]
        plain = {
            name: self._plain(file_name)
            for name, file_name in names.items()
            if file_name not in read and self._model.tensors[file_name].dtype.name in PLAIN_TYPES
        }
        return LayerWeights(matrices, plain)

    def _layer_tensors(self, i: int, codes: Mapping[str, Codes], weights: LayerWeights) -> dict[str, Stored]:
        """Return the tensors of a layer's file, in the order of the source."""
        stems: dict[str, list[str]] = {}
        for stem in codes:
            stems.setdefault(self._plan.sources[stem].tensor, []).append(stem)
        tensors: dict[str, Stored] = {}
        for name, file_name in self._plan.layer_names[i].items():
            for stem in stems.get(file_name, ()):
                for part, tensor in packed(codes[stem], self._form).items():
                    tensors[f"{self._plan.sources[stem].stem}.{part}"] = _stored(tensor)
            if file_name in stems:
                continue
            if name in weights.plain:
                tensors[file_name] = _stored(weights.plain[name])
            else:
                tensors[file_name] = self._as_stored(file_name)
        return tensors

    def _written_layer(self, i: int, context: int) -> Layer:
        """Read a finished layer as the engine will, for positions up to `context`."""
        with open_safetensors(self._folder.file(self._plan.layer_part(i))) as written:
            source = FolderSource(written, self.written_config())
            return dense(load_layer(self._plan.config, source, i, self._device, context))

    def _kind(self, file_name: str) -> str:
        return self._model.tensors[file_name].dtype.name

    def _plain(self, file_name: str) -> Tensor:
        """Return a small tensor with the numbers of the file."""
        array = np.frombuffer(bytearray(self._model.tensor_bytes(file_name)), np.uint8)
        plain = torch.from_numpy(array).view(PLAIN_TYPES[self._kind(file_name)])
        return plain.view(self._model.tensors[file_name].shape)

    def _as_stored(self, file_name: str) -> Stored:
        tensor = self._model.tensors[file_name]
        return Stored(tensor.dtype.name, tensor.shape, self._model.tensor_bytes(file_name))

    def _note_unused(self, i: int, statistics: Mapping[Place, Statistics]) -> None:
        unused = [place for place, seen in statistics.items() if not seen.num_rows and place.role == "feed_in"]
        if unused:
            text = f"layer {i + 1}: {len(unused)} experts saw no token of the calibration, and are rounded plainly"
            self._send(Note(text))

    def _progress(self, i: int, action: str) -> None:
        layers = len(self._plan.config.layers)
        left_s = None
        if self._num_done:
            left_s = (time.monotonic() - self._started) / self._num_done * (layers - i)
        self._send(Int4Progress(i + 1, layers, action, left_s))


def require_memory(plan: Plan, ids: Tensor) -> None:
    """Raise EdgeLMError where one layer with its calibration does not fit in memory."""
    needed = plan.memory_bytes(ids.numel())
    free = available_memory_bytes()
    if needed > free:
        message = f"calibration takes about {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
        raise EdgeLMError(
            message, "lower --samples, close other programs, or use --to int4, which needs no calibration"
        )


def _stored(tensor: Tensor) -> Stored:
    """Return a tensor as the bytes of a file."""
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)
