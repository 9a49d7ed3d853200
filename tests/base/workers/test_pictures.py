"""Pictures of clients: every format becomes plain upright pixels; what is damaged or hostile gets one clear line."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from contextlib import suppress

import pytest
from PIL import Image

from edgelm.base.errors import EngineError, RequestError
from edgelm.base.workers import picture_worker, pictures
from edgelm.base.workers.pictures import ReadPicture, decode_picture, storable_picture

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def two_halves(width: int = 32, height: int = 16) -> Image.Image:
    """Return a picture that is red on the left and blue on the right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def noise(width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(5).randbytes(3 * width * height))


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG whose header claims a size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def pixel(rgb: bytes, width: int, x: int, y: int) -> tuple[int, ...]:
    return tuple(rgb[3 * (y * width + x) : 3 * (y * width + x) + 3])


def is_near(color: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(abs(one - two) < 12 for one, two in zip(color, other, strict=True))


def read_here(data: bytes, max_pixels: int = 2**23, max_bytes: int = 0) -> Image.Image:
    """Decode in this process, as the worker does."""
    result = picture_worker.read(ReadPicture(base64.b64encode(data).decode(), max_pixels, max_bytes))
    raw = base64.b64decode(result.data)
    image = Image.open(io.BytesIO(raw)) if max_bytes else Image.frombytes("RGB", (result.width, result.height), raw)
    assert image.size == (result.width, result.height)
    return image


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_becomes_rgb(kind: str) -> None:
    picture = decode_picture(file_of(two_halves(), kind))
    assert (picture.width, picture.height, len(picture.rgb)) == (32, 16, 32 * 16 * 3)
    assert is_near(pixel(picture.rgb, 32, 2, 8), RED)
    assert is_near(pixel(picture.rgb, 32, 29, 8), BLUE)


def test_the_hash_is_of_the_size_and_the_pixels() -> None:
    one = decode_picture(file_of(two_halves(), "PNG"))
    assert one.sha256 == decode_picture(file_of(two_halves(), "BMP")).sha256
    plain = Image.new("RGB", (32, 16), RED)
    assert decode_picture(file_of(plain, "PNG")).sha256 != decode_picture(file_of(plain.resize((16, 32)), "PNG")).sha256


def test_a_picture_that_comes_again_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(two_halves(), "PNG")
    first = decode_picture(data)
    monkeypatch.setattr(pictures, "Worker", None)
    assert decode_picture(data) is first


def test_kept_pictures_have_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_KEPT_BYTES", 1000)
    kept = pictures._Kept()
    for number in range(5):
        kept.put((bytes([number]), 1), pictures.Picture(10, 10, bytes(300), ""))
    assert [kept.get((bytes([number]), 1)) is not None for number in range(5)] == [False, False, True, True, True]
    kept.put((b"large", 1), pictures.Picture(100, 10, bytes(3000), ""))
    assert kept.get((b"large", 1)) is None


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_a_moving_picture_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), RED), Image.new("RGB", (20, 10), BLUE)]
    image = read_here(file_of(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert is_near(image.getpixel((5, 5)), RED)  # type: ignore[arg-type]


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_turned_as_its_exif_says(turn: int, kind: str) -> None:
    upright = Image.new("RGB", (64, 32), WHITE)
    upright.paste(RED, (0, 0, 32, 16))  # a corner, so that every turn and mirror image differs
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[turn]
    exif = Image.Exif()
    exif[0x0112] = turn
    image = read_here(file_of(stored, kind, exif=exif.tobytes()))
    assert image.size == (64, 32)
    assert is_near(image.getpixel((6, 6)), RED)  # type: ignore[arg-type]
    assert is_near(image.getpixel((58, 6)), WHITE)  # type: ignore[arg-type]
    assert is_near(image.getpixel((6, 26)), WHITE)  # type: ignore[arg-type]


def test_odd_exif_does_not_hide_the_picture() -> None:
    image = read_here(file_of(two_halves(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"))
    assert image.size == (32, 16)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (10, 10), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 5, 10))
    result = read_here(file_of(image.convert(mode), "PNG"))
    assert is_near(result.getpixel((8, 5)), WHITE)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_colour_models_become_rgb(mode: str) -> None:
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    result = read_here(file_of(Image.new("RGB", (16, 16), WHITE).convert(mode), kind))
    assert is_near(result.getpixel((8, 8)), WHITE)  # type: ignore[arg-type]


def test_16_bits_of_grey_keep_their_shades() -> None:
    image = Image.frombytes("I;16", (2, 1), struct.pack("<2H", 0x2000, 0xA000))
    result = read_here(file_of(image, "PNG"))
    assert [result.getpixel((x, 0)) for x in range(2)] == [(0x1F,) * 3, (0x9F,) * 3]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_large_picture_is_reduced(kind: str) -> None:
    image = read_here(file_of(two_halves(900, 300), kind), max_pixels=30_000)
    assert image.size == (300, 100)
    assert is_near(image.getpixel((20, 50)), RED)  # type: ignore[arg-type]
    assert is_near(image.getpixel((280, 50)), BLUE)  # type: ignore[arg-type]


def test_a_turned_picture_is_reduced_in_its_own_shape() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_here(file_of(two_halves(900, 300), "JPEG", exif=exif.tobytes()), max_pixels=30_000).size == (100, 300)


REFUSED = {
    "a drawing": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "is a drawing in SVG"),
    "a drawing without a declaration": (b"\n<svg></svg>", "is a drawing in SVG"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
    "a text": (b"hello", "is not a picture in PNG, JPEG, WebP, GIF or BMP"),
    "nothing": (b"", "is not a picture"),
    "a PDF": (b"%PDF-1.7", "is not a picture"),
    "a bomb": (png(60_000, 60_000), "has 60,000 x 60,000 pixels: more than 67 million are not taken"),
    "a line": (png(1, 100_000), "has 1 x 100,000 pixels: one side is over 200 times as long as the other"),
    "a flat line": (png(100_000, 1), "has 100,000 x 1 pixels"),
    "no pixels": (png(0, 10), "is damaged"),
    "a claim without data": (png(8_000, 8_000), "is damaged or cut off"),
    "a PNG of rubbish": (b"\x89PNG\r\n\x1a\n" + bytes(100), "is damaged"),
    "a JPEG of rubbish": (b"\xff\xd8\xff" + bytes(100), "is damaged"),
    "a WebP of rubbish": (b"RIFF\0\0\0\0WEBP" + bytes(100), "is damaged"),
    "a GIF of rubbish": (b"GIF89a" + bytes(100), "is damaged"),
    "a BMP of rubbish": (b"BM" + bytes(100), "is damaged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_taken_gets_one_line(case: str) -> None:
    data, words = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        decode_picture(data, name="cat.png")
    assert caught.value.message.startswith("cat.png ")
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_is_cut_off_is_refused(kind: str) -> None:
    data = file_of(noise(64, 64), kind)
    for length in (len(data) // 2, len(data) // 8, 30):
        with pytest.raises(RequestError, match="damaged"):
            read_here(data[:length])


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_bytes_are_decoded_or_refused(kind: str) -> None:
    data = file_of(noise(40, 30), kind)
    chance = random.Random(7)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(len(damaged) if chance.random() < 0.5 else 64)] = chance.randrange(256)
        with suppress(RequestError):
            assert read_here(bytes(damaged)).mode == "RGB"


def test_a_file_has_a_limit_of_bytes() -> None:
    with pytest.raises(RequestError, match=r"cat\.png is larger than 20 MiB"):
        decode_picture(bytes(20 * 2**20 + 1), name="cat.png")


def test_a_decoder_that_hangs_or_dies_is_the_pictures_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "DECODE_S", 0.0)
    with pytest.raises(RequestError, match="the picture takes longer than 0 s to decode"):
        decode_picture(file_of(two_halves(12, 12), "PNG"))
    monkeypatch.undo()
    original = pictures.Worker

    def dying(*_: object, **options: object) -> object:
        return original("edgelm.missing_module", **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pictures, "Worker", dying)
    with pytest.raises(RequestError, match="the picture is damaged: decoding it failed"):
        decode_picture(file_of(two_halves(12, 12), "PNG"))


def test_a_process_that_cannot_be_started_is_not_the_pictures_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise EngineError("a process cannot be started: Cannot allocate memory")

    monkeypatch.setattr(pictures, "Worker", refuse)
    with pytest.raises(EngineError, match="the picture cannot be decoded: a process cannot be started"):
        decode_picture(file_of(two_halves(13, 13), "PNG"))


# What is stored


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_small_file_is_stored_as_it_is(kind: str) -> None:
    data = file_of(two_halves(), kind)
    stored = storable_picture(data)
    assert (stored.data, stored.media_type, stored.width, stored.height) == (data, f"image/{kind.lower()}", 32, 16)


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP"])
def test_other_formats_are_stored_as_png(kind: str) -> None:
    stored = storable_picture(file_of(two_halves(), kind))
    assert stored.media_type == "image/png"
    assert is_near(pixel(decode_picture(stored.data).rgb, 32, 2, 8), RED)


def test_what_exif_says_of_a_place_is_not_stored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "in our garden"
    data = file_of(two_halves(), "JPEG", exif=exif.tobytes())
    assert b"in our garden" in data
    stored = storable_picture(data)
    assert b"in our garden" not in stored.data
    assert (stored.width, stored.height) == (16, 32)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_large_picture_is_stored_within_the_limits(kind: str) -> None:
    stored = storable_picture(file_of(noise(2400, 1800), kind))
    assert len(stored.data) <= pictures.MAX_STORED_BYTES
    assert stored.width * stored.height <= pictures.MAX_STORED_PIXELS
    assert stored.media_type == "image/jpeg"
    again = storable_picture(stored.data)
    assert again.data == stored.data
