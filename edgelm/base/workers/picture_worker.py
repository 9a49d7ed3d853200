"""The worker that decodes one picture with Pillow, or draws it as sixels.

Its errors go on from the name of the picture: "is damaged".
"""

from __future__ import annotations

import base64
import io
import math
import re
import sys
import warnings
from collections.abc import Iterator, Sequence

from PIL import Image, ImageOps, WebPImagePlugin

from edgelm.base.errors import RequestError
from edgelm.base.workers.child import Child, limit_memory, run_job
from edgelm.base.workers.pictures import MAX_FILE_PIXELS, MAX_RATIO, DrawnPicture, DrawPicture, ReadPicture, ReadResult

MAX_MEMORY_BYTES = 2 * 2**30
QUALITIES = (90, 80, 70, 60)  # of JPEG, until the file is small enough
MAX_PNG_BYTES = 2**19  # of a new file: a larger one is no drawing, and JPEG takes a tenth of it
METADATA = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp", "photoshop", "comment"}
FORMATS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF", b"BM": "BMP"}
_CHARACTERS = bytes((value + 63) % 256 for value in range(256))  # six pixels as a character: none of them is "?"
_RUN = re.compile(r"(.)\1{3,}")
_SAVE = "save it as PNG or JPEG"


def read(request: ReadPicture) -> ReadResult:
    """Return a picture upright, without transparency and within the limits. Raises RequestError."""
    data = base64.b64decode(request.data)
    kind = _format(data)
    image = _open(data, kind)
    width, height = image.size
    is_small = width * height <= request.max_pixels and len(data) <= request.max_bytes
    pixels = _decoded(image, request.max_pixels)
    if not request.max_bytes:
        return ReadResult(*pixels.size, base64.b64encode(pixels.tobytes()).decode())
    if is_small and kind in ("PNG", "JPEG") and not METADATA.intersection(image.info):
        return ReadResult(width, height, request.data, f"image/{kind.lower()}")
    return _encoded(pixels, request.max_bytes, is_drawing=kind != "JPEG")


def _open(data: bytes, kind: str) -> Image.Image:
    """Return a picture that is not decoded yet, and not too large for that. Raises RequestError."""
    warnings.simplefilter("ignore")  # of Pillow, about EXIF that is odd
    try:
        image = Image.open(io.BytesIO(data), formats=(kind,))
    except Exception:  # noqa: BLE001 - a damaged file may raise anything in Pillow
        raise RequestError("is damaged: its header cannot be read", _SAVE) from None
    _check_size(*image.size)
    return image


def _decoded(image: Image.Image, max_pixels: int) -> Image.Image:
    """Return the pixels of a picture as RGB. Raises RequestError."""
    width, height = image.size
    try:
        return _pixels(image, max_pixels)
    except MemoryError:
        raise RequestError(
            f"has {width:,} x {height:,} pixels, too many to decode here", "send a smaller one"
        ) from None
    except Exception:  # noqa: BLE001 - as above
        raise RequestError("is damaged or cut off", _SAVE) from None


def _format(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    for magic, kind in FORMATS.items():
        if data.startswith(magic):
            return kind
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
        raise RequestError("is a drawing in SVG, which is not taken", _SAVE)
    if data[4:8] == b"ftyp":
        raise RequestError("is a video, or a picture in HEIC or AVIF: neither is taken", _SAVE)
    raise RequestError("is not a picture in PNG, JPEG, WebP, GIF or BMP", _SAVE if data else "it is empty")


def _check_size(width: int, height: int) -> None:
    """Refuse a picture before anything of it is decoded."""
    size = f"has {width:,} x {height:,} pixels"
    if min(width, height) < 1:
        raise RequestError("is damaged: it has no pixels", _SAVE)
    if width * height > MAX_FILE_PIXELS:
        raise RequestError(f"{size}: more than {MAX_FILE_PIXELS // 10**6} million are not taken", "send a smaller one")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RequestError(f"{size}: one side is over {MAX_RATIO} times as long as the other", "cut a part out of it")


def _pixels(image: Image.Image, max_pixels: int) -> Image.Image:
    """Decode the first frame as RGB, upright, on white where it is transparent."""
    if (share := _share(image, max_pixels)) < 1:
        image.draft("RGB", _scaled(image, share))  # a JPEG is decoded at a half, a quarter or an eighth
    image.load()
    turned = _upright(image)
    if turned.mode.startswith("I;16") or turned.mode == "I":  # convert() would clip 16 bits to white
        turned = turned.convert("I").point(lambda value: value / 257).convert("L")
    plain = turned.convert("RGBA" if turned.has_transparency_data else "RGB")
    if (share := _share(plain, max_pixels)) < 1:
        plain = plain.resize(_scaled(plain, share), Image.Resampling.LANCZOS, reducing_gap=2.0)
    if plain.mode == "RGB":
        return plain
    ground = Image.new("RGBA", plain.size, "white")
    return Image.alpha_composite(ground, plain).convert("RGB")


def _share(image: Image.Image, max_pixels: int) -> float:
    """Return by how much both sides are reduced to reach `max_pixels`."""
    return math.sqrt(max_pixels / (image.width * image.height))


def _scaled(image: Image.Image, share: float) -> tuple[int, int]:
    return max(1, int(image.width * share)), max(1, int(image.height * share))


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - odd EXIF data: the picture itself is decoded already
        return image


def _encoded(image: Image.Image, max_bytes: int, *, is_drawing: bool) -> ReadResult:
    """Return a picture as a PNG or, where that is large, as a JPEG."""
    if is_drawing:
        data = _saved(image, "PNG")
        if len(data) <= min(max_bytes, MAX_PNG_BYTES):
            return ReadResult(*image.size, base64.b64encode(data).decode(), "image/png")
    while True:
        for quality in QUALITIES:
            data = _saved(image, "JPEG", quality=quality)
            if len(data) <= max_bytes:
                return ReadResult(*image.size, base64.b64encode(data).decode(), "image/jpeg")
        image = image.reduce(2)  # noise, most likely


def _saved(image: Image.Image, kind: str, quality: int = 0) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": quality} if quality else {}))
    return file.getvalue()


def draw(request: DrawPicture) -> DrawnPicture:
    """Return a picture as sixels, in its own shape; a small one is not enlarged. Raises RequestError."""
    width, height = request.columns * request.cell[0], request.num_lines * request.cell[1]
    # With spare pixels: a long one is reduced to its room, and not to its share of all pixels, afterwards.
    data = base64.b64decode(request.data)
    pixels = _decoded(_open(data, _format(data)), 4 * width * height)
    scale = min(width / pixels.width, height / pixels.height, 1.0)
    size = max(1, round(pixels.width * scale)), max(1, round(pixels.height * scale))
    image = pixels.resize(size, Image.Resampling.LANCZOS)
    colored = image.quantize(request.num_colors)
    if image.getcolors(request.num_colors) is None:
        colored = image.quantize(palette=colored)  # with dithering
    return DrawnPicture(math.ceil(size[0] / request.cell[0]), tuple(_sixels(colored, request.cell[1])))


def _sixels(image: Image.Image, line_height: int) -> Iterator[str]:
    """Yield a picture with a palette as sixels, a line of the screen at a time.

    https://vt100.net/docs/vt3xx-gp/chapter14.html: a character is a column of six pixels of one colour, `!` repeats
    it, `$` goes back to the start of a row of characters, `-` to the next row.
    """
    palette = image.getpalette() or []
    masks = [bytes(int(value == color) for value in range(256)) for color in range(len(palette) // 3)]
    pixels = image.tobytes()
    rows = [pixels[start : start + image.width] for start in range(0, len(pixels), image.width)]
    for top in range(0, len(rows), line_height):
        line = rows[top : top + line_height]
        colors = "".join(
            f"#{color};2;" + ";".join(str(round(value / 2.55)) for value in palette[3 * color : 3 * color + 3])
            for color in sorted(set(b"".join(line)))
        )
        bands = "-".join(_band(line[start : start + 6], masks) for start in range(0, len(line), 6))
        # 1: a pixel without a colour stays as it is. The size keeps the last, cut band from taking a line more.
        yield f'\x1bP0;1;0q"1;1;{image.width};{len(line)}{colors}{bands}\x1b\\'


def _band(rows: Sequence[bytes], masks: Sequence[bytes]) -> str:
    """Return up to six rows of pixels as characters, one colour after the other."""
    parts = []
    for color in sorted(set(b"".join(rows))):
        bits = sum(int.from_bytes(row.translate(masks[color])) << place for place, row in enumerate(rows))
        characters = bits.to_bytes(len(rows[0])).translate(_CHARACTERS).rstrip(b"?").decode()
        parts.append(f"#{color}" + _RUN.sub(lambda run: f"!{len(run[0])}{run[1]}", characters))
    return "$".join(parts)


def _read(request: ReadPicture, child: Child) -> None:
    _limit()
    child.send(read(request))


def _draw(request: DrawPicture, child: Child) -> None:
    _limit()
    child.send(draw(request))


def _limit() -> None:
    limit_memory(MAX_MEMORY_BYTES)
    Image.MAX_IMAGE_PIXELS = None  # `_check_size` has our limit, and one line


if __name__ == "__main__":
    assert WebPImagePlugin.SUPPORTED  # its import registers the format; Pillow would import all of them
    sys.exit(run_job({ReadPicture: _read, DrawPicture: _draw}))
