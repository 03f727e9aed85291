from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mlx_parallm.media.decode import DECODERS, decode_image, read_image
from mlx_parallm.media.formats.exif import orientation_of
from mlx_parallm.media_limits import MOST_RATIO, MOST_SIDE, MediaLimits
from mlx_parallm.types.errors import ConfigError, InvalidRequestError
from tests.unit.media.images import (
    FORMATS,
    exif_of,
    file_of,
    gif_of_frames,
    noise,
    png_chunk,
    png_of_size,
    with_jpeg_segments,
    with_png_chunks,
)

LIMITS = MediaLimits()


def pixels_of(data: bytes) -> np.ndarray:
    return decode_image(read_image(data, LIMITS))


def refusal(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        decode_image(read_image(data, limits))
    return str(refused.value)


def as_pillow_reads(data: bytes) -> np.ndarray:
    """Return what Pillow makes of a file without transparency."""
    with Image.open(BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def on_white(image: Image.Image) -> np.ndarray:
    rgba = np.asarray(image.convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


@pytest.mark.parametrize("size", [(1, 1), (20, 4000), (200, 1), (7, 5), (33, 17), (500, 3)])
@pytest.mark.parametrize("kind", FORMATS)
def test_pixels_are_those_that_pillow_reads(kind, size):
    data = file_of(noise(size=size), kind)
    image = read_image(data, LIMITS)
    assert (image.format, image.size) == (kind, size)
    pixels = decode_image(image)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, as_pillow_reads(data))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *[(mode, "png") for mode in ("1", "L", "P", "RGB")],
        *[(mode, "jpeg") for mode in ("L", "RGB", "CMYK")],
        *[(mode, "gif") for mode in ("1", "L", "P")],
        *[(mode, "bmp") for mode in ("1", "L", "P", "RGB")],
    ],
)
def test_every_mode_becomes_rgb(mode, kind):
    image = noise("RGB", (19, 13)).convert(mode)
    data = file_of(image, kind)
    np.testing.assert_array_equal(pixels_of(data), as_pillow_reads(data))


@pytest.mark.parametrize("options", [{"progressive": True}, {"quality": 5}, {"subsampling": 0}])
def test_kinds_of_jpeg_are_read(options):
    data = file_of(noise(size=(65, 43)), "jpeg", **options)
    np.testing.assert_array_equal(pixels_of(data), as_pillow_reads(data))


def test_a_lossy_webp_is_read():
    data = file_of(noise(size=(65, 43)), "webp", lossless=False)
    np.testing.assert_array_equal(pixels_of(data), as_pillow_reads(data))


@pytest.mark.parametrize(("mode", "kind"), [("LA", "png"), ("RGBA", "png"), ("RGBA", "webp")])
def test_transparency_shows_white(mode, kind):
    image = noise(mode, (19, 13))
    np.testing.assert_allclose(pixels_of(file_of(image, kind)), on_white(image), atol=1)


def test_a_fully_transparent_pixel_is_white_and_an_opaque_one_unchanged():
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert pixels_of(file_of(image)).tolist() == [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize("kind", ["png", "gif"])
def test_the_transparent_entry_of_a_palette_is_white(kind):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    data = file_of(image, kind, transparency=1)
    assert pixels_of(data).tolist() == [[[255, 0, 0], [255, 255, 255]]]


@pytest.mark.parametrize(("mode", "colour"), [("L", 7), ("RGB", (7, 8, 9))])
def test_the_transparent_colour_of_a_png_is_white(mode, colour):
    image = Image.new(mode, (2, 1), colour)
    image.putpixel((1, 0), 0 if mode == "L" else (0, 0, 0))
    data = file_of(image, transparency=colour)
    assert pixels_of(data).tolist() == [[[255, 255, 255], [0, 0, 0]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_exif_turns_as_pillow_does(kind, orientation):
    data = file_of(noise(size=(13, 6)), kind, exif=exif_of(orientation))
    expected = as_pillow_reads(data)
    image = read_image(data, LIMITS)
    assert image.size == expected.shape[1::-1]
    np.testing.assert_array_equal(decode_image(image), expected)


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        exif_of(9),
        exif_of(0),
        exif_of(6)[:20],
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
    ],
)
def test_a_bad_orientation_turns_nothing(exif):
    assert orientation_of(exif) == 1


def test_long_exif_is_not_copied():
    exif = exif_of(6).removeprefix(b"Exif\0\0") + bytes(10_000_000)
    data = with_png_chunks(file_of(noise()), png_chunk(b"eXIf", exif))
    tracemalloc.start()
    try:
        assert read_image(data, LIMITS).size == (5, 7)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("order", ["little", "big"])
def test_the_orientation_is_read_in_both_byte_orders(order):
    numbers = ((42, 2), (8, 4), (1, 2), (0x0112, 2), (3, 2), (1, 4), (6, 2), (0, 2))
    tiff = b"".join(value.to_bytes(size, order) for value, size in numbers)
    prefix = b"Exif\0\0" + (b"II" if order == "little" else b"MM")
    assert orientation_of(prefix + tiff) == 6


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_the_first_frame_of_an_animation_is_taken(kind):
    frames = [noise(size=(6, 4), seed=seed) for seed in range(3)]
    still = file_of(frames[0], kind)
    animation = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
    assert len(animation) > len(still)
    np.testing.assert_array_equal(pixels_of(animation), pixels_of(still))
    assert len(read_image(animation, LIMITS).content) < len(animation)


def test_frames_that_differ_from_the_screen_have_pillows_size():
    data = bytearray(file_of(noise(size=(6, 4)), "gif"))
    data[6:10] = b"\x02\x00\x09\x00"
    image = read_image(bytes(data), LIMITS)
    assert image.size == (6, 9)
    np.testing.assert_array_equal(decode_image(image), as_pillow_reads(bytes(data)))


def test_metadata_does_not_reach_the_decoder():
    secret = b"tEXt-secret" * 100
    text = png_chunk(b"zTXt", secret)
    image = read_image(with_png_chunks(file_of(noise()), text), LIMITS)
    assert b"secret" not in image.content
    segment = b"\xff\xe2" + (len(secret) + 2).to_bytes(2, "big") + secret
    image = read_image(with_jpeg_segments(file_of(noise(), "jpeg"), segment), LIMITS)
    assert b"secret" not in image.content


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<?xml version='1.0'?>\n<!-- x -->\n<svg/>", "SVG"),
        (b"\xef\xbb\xbf  <!DOCTYPE html><html></html>", "HTML"),
        (b"<HTML><body>", "HTML"),
        (b"<?xml version='1.0'?><a/>", "XML"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0", "HEIC"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "a film"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\xff\x4f\xff\x51\0\x2f", "JPEG 2000"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"", "an empty file"),
    ],
)
def test_formats_that_are_not_taken_are_named(data, name):
    assert refusal(data) == f"This is {name}. Images may be PNG, JPEG, WebP, GIF and BMP."


def test_what_pillow_writes_in_other_formats_is_named():
    image = noise(size=(16, 16))
    for kind, name in (("avif", "AVIF"), ("jpeg2000", "JPEG 2000"), ("tiff", "TIFF")):
        assert f"This is {name}." in refusal(file_of(image, kind))
    assert "This is ICO." in refusal(file_of(image, "ico"))


def test_a_png_of_16_bits_is_named():
    data = file_of(Image.fromarray(np.arange(6, dtype=np.uint16).reshape(2, 3)))
    assert "16 bits per channel" in refusal(data)


def test_renamed_and_random_files_are_refused():
    assert "This is not an image." in refusal(b"#!/bin/sh\nexit\n")
    assert "damaged" in refusal(b"\x89PNG\r\n\x1a\n" + b"text" * 20)
    assert "damaged" in refusal(b"BMxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")


def test_a_bmp_with_run_lengths_is_named():
    data = bytearray(file_of(noise("P"), "bmp"))
    data[30] = 1
    assert "run-length" in refusal(bytes(data))


def files_to_cut() -> dict[str, tuple[str, bytes]]:
    """Return format and bytes of small files whose parts decoders treat differently."""
    small, larger = noise(size=(9, 4)), noise(size=(90, 40))
    frames = [noise(size=(6, 4), seed=seed) for seed in range(3)]
    files = {kind: (kind, file_of(small, kind)) for kind in FORMATS}
    files["bmp, palette"] = "bmp", file_of(small.convert("P"), "bmp")
    files["bmp, padded rows"] = "bmp", file_of(noise(size=(5, 3)), "bmp")
    files["jpeg, progressive"] = "jpeg", file_of(larger, "jpeg", progressive=True)
    files["webp, lossy"] = "webp", file_of(larger, "webp", lossless=False)
    for kind in ("gif", "webp", "png"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
        files[f"{kind}, animated"] = kind, data
    return files


CUT = files_to_cut()


def outcome(read: Callable[[], np.ndarray]) -> list[int] | None:
    """Return the pixels, or None if the file is refused."""
    try:
        return read().tolist()
    except (InvalidRequestError, OSError, SyntaxError, EOFError, ValueError, struct.error):
        return None


@pytest.mark.parametrize("name", CUT)
def test_a_cut_file_is_shown_where_pillow_shows_it(name):
    kind, data = CUT[name]

    def as_the_decoder_reads(part: bytes) -> np.ndarray:
        with DECODERS[kind](BytesIO(part)) as image:
            image.load()
            return np.asarray(image.convert("RGB"))

    for length in range(len(data) + 1):
        part = data[:length]
        expected = outcome(partial(as_the_decoder_reads, part))
        assert outcome(partial(pixels_of, part)) == expected, length


@pytest.mark.parametrize("kind", ["png", "gif"])
def test_files_without_their_end_are_shown(kind):
    data = file_of(noise("P"), kind)
    end = {"png": png_chunk(b"IEND"), "gif": b";"}[kind]
    assert data.endswith(end)
    np.testing.assert_array_equal(pixels_of(data.removesuffix(end)), pixels_of(data))


@pytest.mark.parametrize("kind", ["jpeg", "gif"])
def test_stray_bytes_between_parts_are_skipped(kind):
    data = file_of(noise("L"), kind)
    # The segment of JFIF ends at 20.
    place = 20 if kind == "jpeg" else data.index(b"\x2c\0\0\0\0")
    stray = data[:place] + b"\x07\x08" + data[place:]
    np.testing.assert_array_equal(pixels_of(stray), as_pillow_reads(stray))
    many = data[:place] + b"\x07" * 400_000 + data[place:]
    assert "too many parts" in refusal(many)


@settings(max_examples=300, deadline=None)
@examples(data=st.data())
def test_damaged_files_are_images_or_refused(data):
    kind = data.draw(st.sampled_from(FORMATS))
    file = bytearray(file_of(noise(size=(9, 4)), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    limits = MediaLimits(max_pixels=100_000)
    try:
        image = read_image(bytes(file), limits)
        pixels = decode_image(image)
    except InvalidRequestError:
        return
    assert pixels.shape == (*image.size[::-1], 3)


@settings(max_examples=200, deadline=None)
@examples(
    start=st.sampled_from(
        [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\x20\0\0\0WEBP", b"BM"]
    ),
    rest=st.binary(max_size=200),
)
def test_garbage_is_refused(start, rest):
    refusal(start + rest, MediaLimits(max_pixels=100_000))


def test_too_many_bytes_are_refused_before_they_are_looked_at():
    data = file_of(noise())
    limits = MediaLimits(max_bytes=len(data))
    assert read_image(data, limits).size == (7, 5)
    assert "larger than" in refusal(data + b"\0", limits)


def test_too_many_pixels_are_refused():
    limits = MediaLimits(max_pixels=34)
    for kind in FORMATS:
        assert "7 x 5 pixels; at most 34" in refusal(file_of(noise(), kind), limits)
        assert read_image(file_of(noise(), kind), MediaLimits(max_pixels=35)).size == (7, 5)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((MOST_SIDE + 1, 1200), f"at most {MOST_SIDE} are allowed along a side"),
        ((1200, MOST_SIDE + 1), f"at most {MOST_SIDE} are allowed along a side"),
        ((MOST_RATIO + 1, 1), f"at most {MOST_RATIO} times as long as the other"),
        ((3, 3 * MOST_RATIO + 1), f"at most {MOST_RATIO} times as long as the other"),
        ((40_000_000, 1), "along a side"),
    ],
)
def test_lines_are_refused_before_they_are_decoded(size, message, monkeypatch):
    monkeypatch.setattr("mlx_parallm.media.decode.DECODERS", {})
    assert message in refusal(png_of_size(*size))


def test_long_screenshots_are_taken():
    for size in ((1080, MOST_SIDE), (MOST_RATIO, 1), (1, MOST_RATIO)):
        assert read_image(png_of_size(*size), LIMITS).size == size


def test_a_image_without_memory_is_refused(monkeypatch):
    def fail(content: BytesIO) -> None:
        raise MemoryError

    monkeypatch.setattr("mlx_parallm.media.decode.DECODERS", {"png": fail})
    assert "no memory" in refusal(file_of(noise()))


def test_bombs_are_refused_without_memory():
    bomb = png_of_size(60_000, 60_000)
    assert len(bomb) < 3000
    film = gif_of_frames(10_000)
    tracemalloc.start()
    try:
        assert "60000 x 60000" in refusal(bomb)
        assert "more than 1000 frames" in refusal(film)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_sizes_are_refused_before_a_decoder_is_made(monkeypatch):
    monkeypatch.setattr("mlx_parallm.media.decode.DECODERS", {})
    assert "60000 x 60000" in refusal(png_of_size(60_000, 60_000))


def test_files_with_many_parts_are_refused():
    png, jpeg = file_of(noise()), file_of(noise(), "jpeg", progressive=True)
    assert "too many parts" in refusal(with_png_chunks(png, png_chunk(b"teXt") * 300))
    assert "too many parts" in refusal(with_jpeg_segments(jpeg, b"\xff\xe5\0\2" * 3000))
    assert "too many parts" in refusal(with_jpeg_segments(jpeg, b"\xff" * 3000))
    np.testing.assert_array_equal(
        pixels_of(with_jpeg_segments(jpeg, b"\xff" * 3)), as_pillow_reads(jpeg)
    )
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    assert "too many parts" in refusal(jpeg[:-2] + scan * 40 + jpeg[-2:])
    gif = file_of(noise(), "gif")
    assert "too many parts" in refusal(gif[:-1] + b"\x21\xfe" + b"\1x" * 300_000 + b"\0;")
    webp = file_of(noise(), "webp")
    chunks = b"junk\0\0\0\0" * 1000
    size = (len(webp) - 8 + len(chunks)).to_bytes(4, "little")
    assert "too many parts" in refusal(webp[:4] + size + webp[8:] + chunks)


def test_an_apng_that_promises_many_frames_is_refused():
    promise = png_chunk(b"acTL", (10_000).to_bytes(4, "big") + bytes(4))
    assert "more than 1000 frames" in refusal(with_png_chunks(file_of(noise()), promise))


def test_a_size_that_the_decoder_reads_otherwise_is_refused():
    data = bytearray(file_of(noise(), "webp"))
    image = read_image(bytes(data), LIMITS)
    assert decode_image(image).shape == (5, 7, 3)
    wrong = type(image)("webp", 8, 5, image.content)
    with pytest.raises(InvalidRequestError, match="damaged"):
        decode_image(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_pixels", 0),
        ("max_pixels", 200_000_000),
        ("max_pixels_in_flight", 1),
        ("max_fetched_bytes", 1),
    ],
)
def test_limits_that_no_image_could_meet_are_refused(name, value):
    with pytest.raises(ConfigError):
        replace(LIMITS, **{name: value})


def test_too_many_images_name_the_field():
    LIMITS.check_count(16, param="messages")
    with pytest.raises(InvalidRequestError, match="17 images; at most 16") as refused:
        LIMITS.check_count(17, param="messages")
    assert refused.value.param == "messages"
