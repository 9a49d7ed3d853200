"""Projector: a model's eyes, by llama.cpp's libmtmd: pictures become tokens, and embeddings when the model reads them.

Owns libmtmd's context, and the pictures that were prepared or encoded last, within a limit of bytes. Knows nothing of
messages, sequences and the KV cache. A picture's tokens are negative numbers made from its hash and from the
projector's identity, so that a cached prefix with a picture serves only the same picture, encoded in the same way.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import fill_struct, native_log, on_log
from edgelm.backends.llama.binding import L, load_mtmd
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.errors import BusyError, EdgeLMError, EngineError, ModelError, RequestError
from edgelm.base.workers.pictures import Picture, decode_picture
from edgelm.checkpoints.files import file_identity
from edgelm.engine.core import LAST, PicturePart

KEPT_BYTES = 256 * 2**20  # of pictures that no request uses now
MAX_BYTES = 2**30  # of all, those of open requests too
PREPARED_BYTES = 40 * 2**10  # of a picture's pixels for one token, as libmtmd prepares them: at most so many
PROBES = ((4096, 4096), (4096, 1024), (1024, 4096), (512, 512))  # sizes of pictures, of which one has the most tokens


class Tile:
    """A picture, or a tile of one, as libmtmd prepared it. It is encoded at its first use."""

    def __init__(self, mtmd: Any, chunk: Any) -> None:
        self._mtmd = mtmd
        self.chunk = mtmd.mtmd_input_chunk_copy(chunk)
        self._free = weakref.finalize(self, mtmd.mtmd_input_chunk_free, self.chunk)
        self.num_tokens: int = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        self.num_positions: int = mtmd.mtmd_input_chunk_get_n_pos(chunk)
        self._embeddings: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        return self.num_tokens * PREPARED_BYTES if self._embeddings is None else self._embeddings.nbytes

    def embeddings(self, context: Any, width: int) -> NDArray[np.float32]:
        """Return what the model reads in place of tokens: [tokens, width]. Raises EngineError."""
        if self._embeddings is None:
            native_log.clear()
            if self._mtmd.mtmd_encode_chunk(context, self.chunk):
                raise EngineError(f"the picture could not be encoded: {native_log.first_error()}")
            output = self._mtmd.mtmd_get_output_embd(context)
            self._embeddings = np.ctypeslib.as_array(output, (self.num_tokens, width)).copy()
            without_pixels = self._mtmd.mtmd_input_chunk_get_placeholder(self.chunk)
            self._free()
            self.chunk = without_pixels
            self._free = weakref.finalize(self, self._mtmd.mtmd_input_chunk_free, without_pixels)
        return self._embeddings

    def positions(self, first: int) -> NDArray[np.int32]:
        """Return the four positions of each token in a model with M-RoPE, the first at `first`: [4, tokens]."""
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_image(self.chunk)
        places = [
            self._mtmd.mtmd_image_tokens_get_decoder_pos(tokens, first, index) for index in range(self.num_tokens)
        ]
        return np.array([[place.t, place.y, place.x, place.z] for place in places], np.int32).T.copy()


class Projector:
    """The projector of a loaded model: a `PictureReader`, and the executor's source of embeddings.

    Raises ModelError for a file that libmtmd refuses or that belongs to another model, EngineError without libmtmd.
    """

    def __init__(self, path: Path, model: LlamaModel, threads: int) -> None:
        self._mtmd = mtmd = load_mtmd()
        native_log.clear()
        mtmd.mtmd_log_set(on_log, None)
        params = fill_struct(
            mtmd.mtmd_context_params_default(),
            use_gpu=bool(model.placement.devices),
            print_timings=False,
            n_threads=threads,
        )
        self._context: Any = mtmd.mtmd_init_from_file(os.fsencode(path), model.native, params)
        if not self._context:
            reason = native_log.first_error() or "libmtmd gives no reason"
            raise ModelError(
                f"the projector {path.name} cannot be loaded: {reason}", "take the one that belongs to the model"
            )
        if not mtmd.mtmd_support_vision(self._context):
            self.close()
            raise ModelError(f"the projector {path.name} reads no pictures", "take one for pictures")
        self.width: int = L.llama_model_n_embd_inp(model.native)
        self.mrope: bool = mtmd.mtmd_decode_use_mrope(self._context)
        self.whole: bool = mtmd.mtmd_decode_use_non_causal(self._context, None)
        self.encode_ms = 0.0
        self._identity = hashlib.sha256(b"".join(file_identity([path]))).digest()
        self._kept: OrderedDict[bytes, tuple[PicturePart, ...]] = OrderedDict()  # by the hash of the file
        self._tiles: weakref.WeakSet[Tile] = weakref.WeakSet()
        self._lock = threading.Lock()  # for these two
        try:
            self.max_tokens = max(self._most_tokens(width, height) for width, height in PROBES)
        except EdgeLMError:
            self.close()
            raise

    def read(self, data: bytes) -> tuple[PicturePart, ...]:
        """Return the parts of a picture from the bytes of its file. Raises RequestError, BusyError."""
        key = hashlib.sha256(data).digest()
        with self._lock:
            if parts := self._kept.get(key):
                self._kept.move_to_end(key)
                return parts
            if sum(tile.nbytes for tile in self._tiles) > MAX_BYTES:
                raise BusyError("the pictures of other requests fill the memory for them", "send it again later")
        parts = self._parts(decode_picture(data))
        with self._lock:
            self._kept[key] = parts
            self._tiles.update(part.source for part in parts if isinstance(part.source, Tile))
            while len(self._kept) > 1 and sum(map(_nbytes, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return parts

    def embeddings(self, tile: Tile) -> NDArray[np.float32]:
        """Return the embeddings of a tile: [tokens, width]. For the engine's thread. Raises EngineError."""
        began = time.perf_counter()
        embeddings = tile.embeddings(self._context, self.width)
        self.encode_ms += 1000 * (time.perf_counter() - began)
        return embeddings

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            self._mtmd.mtmd_free(context)

    def _parts(self, picture: Picture) -> tuple[PicturePart, ...]:
        rgb = (ctypes.c_uint8 * len(picture.rgb)).from_buffer_copy(picture.rgb)
        parts = []
        with self._chunks(picture.width, picture.height, rgb) as chunks:
            for number, chunk in enumerate(chunks):
                if text := self._text(chunk):
                    parts.append(PicturePart(text, len(text)))
                    continue
                tile = Tile(self._mtmd, chunk)
                digest = hashlib.sha256(self._identity + f"{picture.sha256} {number}".encode()).digest()
                parts.append(PicturePart(_tokens(digest, tile.num_tokens), tile.num_positions, self.whole, tile))
        return tuple(parts)

    def _text(self, chunk: Any) -> tuple[int, ...]:
        """Return the tokens of a chunk of text; none: it is a part of the picture."""
        if self._mtmd.mtmd_input_chunk_get_type(chunk) != self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            return ()
        count = ctypes.c_size_t()
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        text = tuple(tokens[: count.value])
        if min(text, default=0) < 0:
            raise ModelError(
                "the model's vocabulary lacks a token that its projector needs", "--mmproj off goes without"
            )
        return text

    def _most_tokens(self, width: int, height: int) -> int:
        """Return the tokens of the largest tile of a picture of that size."""
        with self._chunks(width, height, None) as chunks:
            counts = [self._mtmd.mtmd_input_chunk_get_n_tokens(chunk) for chunk in chunks if not self._text(chunk)]
        return int(max(counts))

    @contextmanager
    def _chunks(self, width: int, height: int, rgb: Any) -> Iterator[list[Any]]:
        """Give the chunks of a picture; without pixels, only to be counted. Raises RequestError."""
        mtmd = self._mtmd
        bitmap = mtmd.mtmd_bitmap_init(width, height, rgb)
        chunks = mtmd.mtmd_input_chunks_init()
        part = fill_struct(mtmd.mtmd_input_part(), bitmap=bitmap)
        native_log.clear()
        try:
            if mtmd.mtmd_tokenize_from_parts(
                self._context, chunks, (ctypes.POINTER(type(part)) * 1)(ctypes.pointer(part)), 1, False
            ):
                reason = native_log.first_error() or "libmtmd gives no reason"
                raise RequestError(f"a picture of {width} x {height} cannot be prepared: {reason}", "send another one")
            yield [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(mtmd.mtmd_input_chunks_size(chunks))]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)


class PictureBatch:
    """A llama_batch of embeddings, for one sequence."""

    def __init__(self, embeddings: NDArray[np.float32], positions: NDArray[np.int32], slot: int) -> None:
        count = len(embeddings)
        self._arrays = (np.ascontiguousarray(embeddings), np.ascontiguousarray(positions))
        self._seq, self._num_seqs = np.full(count, slot, np.int32), np.ones(count, np.int32)
        self._out = np.zeros(count, np.int8)
        self._seq_pointers = np.full(count, self._seq.ctypes.data, np.uint64)
        pointer = ctypes.POINTER
        self.native = fill_struct(
            L.llama_batch(),
            n_tokens=count,
            embd=ctypes.cast(self._arrays[0].ctypes.data, pointer(ctypes.c_float)),
            pos=ctypes.cast(self._arrays[1].ctypes.data, pointer(ctypes.c_int32)),
            n_seq_id=ctypes.cast(self._num_seqs.ctypes.data, pointer(ctypes.c_int32)),
            seq_id=ctypes.cast(self._seq_pointers.ctypes.data, pointer(pointer(ctypes.c_int32))),
            logits=ctypes.cast(self._out.ctypes.data, pointer(ctypes.c_int8)),
        )


def _tokens(digest: bytes, count: int) -> tuple[int, ...]:
    """Return `count` numbers below LAST that all depend on a hash."""
    words = np.frombuffer(hashlib.shake_256(digest).digest(4 * count), "<u4").astype(np.int64)
    return tuple((LAST - 1 - words % (2**31 + LAST)).tolist())


def _nbytes(parts: tuple[PicturePart, ...]) -> int:
    return sum(part.source.nbytes for part in parts if isinstance(part.source, Tile))
