"""A folder of safetensors as a GGUF: what is refused, what the file consists of, and the order of the work.

Owns also the cache of those that are made of a BERT's folder where a job names it.

The parts are in layout.py and encoder.py (tensors), keys.py and vocabulary.py (metadata), gguf_file.py (the file), and
check.py (what is compared before the file gets its name).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from edgelm.base.errors import ModelError
from edgelm.base.kept_files import keep_newest
from edgelm.checkpoints.config_json import CONFIG, decoder_values, read_config_json
from edgelm.checkpoints.encoder import BERT, POOLING, EncoderConfig, encoder_config, is_encoder, other_encoder
from edgelm.checkpoints.files import file_identity, shown
from edgelm.checkpoints.folder import folder_name
from edgelm.checkpoints.quantization import file_exists, quantization_label, quantization_section, read_quantization
from edgelm.checkpoints.recommended import folder_sampling
from edgelm.checkpoints.safetensors import Safetensors, open_safetensors
from edgelm.library.details import folder_licence
from edgelm.making.conversion.encoder import plan_encoder
from edgelm.making.conversion.gguf_file import GGUFFile, disk_errors, open_unfinished
from edgelm.making.conversion.keys import Description, notes, write_encoder_keys, write_model_keys
from edgelm.making.conversion.layout import Layout, plan_layout, target_family
from edgelm.making.conversion.number_types import Kind, Target
from edgelm.making.conversion.reader import Change, FolderReader
from edgelm.making.conversion.tokenizer_files import read_tokenizer_files, tokenizer_paths
from edgelm.making.conversion.vocabulary import Vocabulary, read_vocabulary, write_vocabulary_keys
from edgelm.models.config import ModelConfig, read_config

FORMAT = 3  # of the files that this version writes: an unfinished one of another starts over
# llama.cpp strips the white space behind special tokens of models with this name, and fails without these tokens
PHI = re.compile(r"phi-?3", re.IGNORECASE)
HEADS = "mtp."  # tensors of multi-token prediction
PHI_TOKENS = frozenset({"<unk>", "<s>", "</s>", "<|endoftext|>"})
KEPT = 4  # GGUFs of BERTs in the cache, the last used ones
GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Source:
    """A folder that can be converted, and the GGUF that it becomes."""

    folder: Path
    config: ModelConfig | EncoderConfig
    layout: Layout
    vocabulary: Vocabulary
    about: Description
    reader: FolderReader
    to: Target

    @property
    def architecture(self) -> str:
        """The architecture that the GGUF states."""
        return BERT if isinstance(self.config, EncoderConfig) else target_family(self.config).gguf

    @property
    def used(self) -> frozenset[str]:
        """The tensors of the folder that the GGUF is made of."""
        return frozenset(self.reader.model.tensors).difference(self.layout.towers, self.layout.left_out)

    @property
    def notes(self) -> list[str]:
        """Facts about the result that the user should know."""
        lines = [] if isinstance(self.config, EncoderConfig) else list(notes(self.config))
        if self.to != "source" and Kind.MXFP4.name in self.layout.types:
            lines.append("the experts are stored in MXFP4, and stay so")
        if towers := self.layout.towers:
            lines.append(f"only the text part is converted: {len(towers):,} tensors for images or sound are left out")
        heads = [name for name in self.layout.left_out if name.startswith(HEADS)]
        if heads:
            lines.append(f"the heads that predict several tokens are left out: {len(heads):,} tensors")
        if others := [name for name in self.layout.left_out if name not in heads]:
            names = ", ".join(map(shown, others[:3])) + (" …" if len(others) > 3 else "")
            lines.append(f"left out, since llama.cpp has no use for them: {names}")
        return lines

    def writer(self) -> GGUFWriter:
        """Return a writer with all keys, and no tensors yet. Raises ModelError."""
        writer = GGUFWriter(None, self.architecture)
        if isinstance(self.config, EncoderConfig):
            write_encoder_keys(writer, self.config, self.layout, self.about)
        else:
            write_model_keys(writer, self.config, self.layout, self.about)
        write_vocabulary_keys(writer, self.vocabulary)
        return writer


@dataclass(frozen=True, slots=True)
class Report:
    """The callbacks of a conversion: bytes done and in all, and what it does apart from writing."""

    written: Callable[[int, int], None] = lambda *_: None
    stage: Callable[[str], None] = lambda _: None


def convert_folder(
    folder: Path,
    out: Path,
    to: Target = "source",
    *,
    change: Change | None = None,
    change_key: str = "",
    accept: Callable[[Source], None] | None = None,
    report: Report | None = None,
    check: Callable[[Source, Path], None] | None = None,
) -> Source:
    """Write a folder of safetensors as a GGUF, which has its name only when it is whole and checked.

    `change` takes the rows of the folder's tensors and returns others, such as those with an adapter; `change_key`
    tells one change from another. `accept` gets the plan, and may raise ModelError before anything is written. `check`
    gets the unfinished file and raises EdgeLMError for a wrong one, which is then deleted. An interrupted conversion
    goes on where it stopped. Raises EdgeLMError.
    """
    report = report or Report()
    with ExitStack() as resources:
        report.stage(f"reading {shown(folder.name)}")
        source = open_source(folder, to, resources, change)
        source.writer()  # refuses what llama.cpp cannot compute before anything is written
        if accept:
            accept(source)
        out = out.absolute()
        file: GGUFFile = resources.enter_context(open_unfinished(out, content_key(source, to, change_key)))
        try:
            file.write(
                source.writer,
                source.layout.tensors,
                lambda tensor: tensor.content.pieces(source.reader, tensor.kind),
                report.written,
            )
        except BaseException:
            if not file.num_done:
                file.discard()
            raise
        try:
            if check:
                check(source, file.part)
        except ModelError:
            file.discard()
            raise
        file.finish()
        return source


def open_source(folder: Path, to: Target, resources: ExitStack, change: Change | None = None) -> Source:
    """Open a folder and plan its GGUF; `resources` closes it. Raises ModelError where it cannot be converted."""
    if not file_exists(folder / CONFIG):
        raise ModelError(f"{shown(folder.name)} has no {CONFIG}", "download all files of the model into one folder")
    document = read_config_json(folder)
    _refuse_quantized(document)
    if problem := other_encoder(document):
        raise ModelError(problem, "take a GGUF of the same model")
    model = resources.enter_context(open_safetensors(folder))
    reader = resources.enter_context(FolderReader(model, change))
    config: ModelConfig | EncoderConfig
    if is_encoder(document):
        config = encoder_config(folder, document)
        layout = plan_encoder(config, reader, to)
    else:
        config = read_config(document)
        layout = plan_layout(config, reader, to)
    num_rows = next(tensor.shape[0] for tensor in layout.tensors if tensor.name == "token_embd.weight")
    vocabulary = read_vocabulary(read_tokenizer_files(folder), num_rows)
    inner = decoder_values(document).get("intermediate_size")
    name = _name(folder_name(folder), vocabulary)
    inner_size = inner if isinstance(inner, int) else 0
    about = Description(name, folder_licence(folder) or "", inner_size, folder_sampling(folder))
    return Source(folder, config, layout, vocabulary, about, reader, to)


def _name(name: str, vocabulary: Vocabulary) -> str:
    """Return a name by which llama.cpp treats special tokens as the folder's tokenizer does."""
    strippable = PHI_TOKENS.issubset(vocabulary.tokens)
    if PHI.search(name) and not strippable:
        return PHI.sub("Phi 3", name)
    return f"{name} (Phi-3)" if vocabulary.strips and strippable and not PHI.search(name) else name


def _refuse_quantized(document: dict[str, Any]) -> None:
    section = quantization_section(document)
    if not section or read_quantization(document).method == "mxfp4":
        return
    label = quantization_label(section)
    raise ModelError(f"the folder's weights are quantized ({label})", "convert the model's 16-bit files")


def content_key(source: Source, to: Target, change_key: str = "") -> str:
    """Return a digest of all that the bytes of the file depend on."""
    digest = hashlib.sha256(json.dumps([FORMAT, to, change_key, source.about.name, source.about.licence]).encode())
    model: Safetensors = source.reader.model
    files = [*model.paths, source.folder / CONFIG, *tokenizer_paths(source.folder)]
    if (pooling := source.folder / POOLING).is_file():
        files.append(pooling)
    try:
        for part in file_identity(files):
            digest.update(part)
    except OSError as error:
        raise ModelError(f"{source.folder.name} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def kept_gguf(folder: Path, cache: Path) -> Path:
    """Return the GGUF of a BERT's folder, kept in the cache for the next process. Raises EdgeLMError."""
    with ExitStack() as resources:
        key = content_key(open_source(folder, "source", resources), "source")
    file = cache / "converted" / f"{key[:32]}{GGUF}"
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (file.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process that wants the same file waits for it
            if not file.exists():
                convert_folder(folder, file)
                keep_newest(file.parent, KEPT, f"*{GGUF}")
            os.utime(file)
    return file
