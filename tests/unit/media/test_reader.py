from __future__ import annotations

import asyncio
import base64
import threading

import numpy as np
import pytest

from mlx_parallm.media.fetch import Fetcher
from mlx_parallm.media.reader import ImageReader
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError
from tests.unit.media.images import FORMATS, file_of, noise, png_of_size
from tests.unit.media.servers import Names, Network, serving

PARAM = "messages[1].content[2].image_url"
IMAGE = noise()
FILE = file_of(IMAGE)


def data_url(file: bytes = FILE, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def reader_of(**limits) -> ImageReader:
    return ImageReader(MediaLimits(**limits))


async def pixels_of(reader: ImageReader, url: str) -> np.ndarray:
    async with reader.from_url(url, param=PARAM) as image:
        return image.pixels


async def refusal(reader: ImageReader, url: str) -> str:
    free = reader.num_free_pixels
    with pytest.raises(InvalidRequestError) as refused:
        await pixels_of(reader, url)
    assert refused.value.param == PARAM
    assert reader.num_free_pixels == free
    return str(refused.value)


@pytest.mark.parametrize("kind", FORMATS)
async def test_data_urls_become_pixels(kind):
    async with reader_of().from_url(
        data_url(file_of(IMAGE, kind), kind).replace("data:", "DATA:"), param=PARAM
    ) as image:
        assert image.format == kind
        assert image.pixels.shape == (5, 7, 3)
        if kind in ("png", "webp", "bmp"):
            np.testing.assert_array_equal(image.pixels, np.asarray(IMAGE))


async def test_files_below_the_folder_become_pixels(tmp_path):
    (tmp_path / "a.png").write_bytes(FILE)
    reader = reader_of(allowed_local_path=str(tmp_path))
    pixels = await pixels_of(reader, f"FILE://{tmp_path}/a.png")
    np.testing.assert_array_equal(pixels, np.asarray(IMAGE))
    assert "no such file" in await refusal(reader, "file:///etc/passwd")
    assert "allowed-local-media-path" in await refusal(reader_of(), f"file://{tmp_path}/a.png")


async def test_hosts_images_become_pixels():
    async with serving() as server:
        server.add("/a.png", FILE)
        server.add("/page", b"<html>secret")
        limits = MediaLimits(allowed_domains=("*",))
        fetcher = Fetcher(limits, resolve=Names(), network=Network(server.port))
        reader = ImageReader(limits, fetcher=fetcher)
        async with reader.from_url("http://pictures.test/a.png", param=PARAM) as image:
            np.testing.assert_array_equal(image.pixels, np.asarray(IMAGE))
            assert fetcher.num_bytes == len(FILE)
        assert fetcher.num_bytes == 0
        message = await refusal(reader, "http://pictures.test/page")
        assert message.startswith("This is HTML.")
        assert fetcher.num_bytes == 0


async def test_no_host_is_asked_by_default():
    assert "send them as data URLs" in await refusal(reader_of(), "https://pictures.test/a.png")


async def test_texts_of_base64_and_bytes_become_pixels():
    reader, text = reader_of(), base64.b64encode(FILE).decode()
    for media_type in (None, "image/png", "IMAGE/PNG"):
        async with reader.from_base64(text, media_type, param=PARAM) as image:
            np.testing.assert_array_equal(image.pixels, np.asarray(IMAGE))
    async with reader.from_bytes(FILE, param=PARAM) as image:
        np.testing.assert_array_equal(image.pixels, np.asarray(IMAGE))
    for provided in (
        reader.from_base64(text, "image/jpeg", param=PARAM),
        reader.from_base64(f"{text}\n", "image/png", param=PARAM),
        reader.from_base64(text.rstrip("=") + "*", param=PARAM),
        reader.from_bytes(FILE[:60], param=PARAM),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            async with provided:
                pytest.fail("It was taken.")
        assert refused.value.param == PARAM


@pytest.mark.parametrize("kind", ["jpeg", "svg+xml", "png;charset=utf-8"])
async def test_bytes_decide_what_a_image_is(kind):
    image = await pixels_of(reader_of(), data_url(FILE, kind))
    np.testing.assert_array_equal(image, np.asarray(IMAGE))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (data_url(b"<svg/>", "svg+xml"), "This is SVG."),
        (data_url(FILE[:60]), "truncated or damaged"),
        (data_url(png_of_size(60_000, 60_000)), "60000 x 60000"),
        (data_url() + "*", "not valid base64"),
        ("data:text/html,x", "must have the form"),
        ("", "must begin with"),
        ("/etc/passwd", "must begin with"),
        ("ftp://pictures.test/a.png", "must begin with"),
    ],
)
async def test_errors_name_the_part_of_the_request(url, message):
    assert message in await refusal(reader_of(), url)


async def test_sizes_may_be_refused_before_pixels_are_decoded(monkeypatch):
    def check(width: int, height: int) -> None:
        raise InvalidRequestError(f"{width} x {height}")

    monkeypatch.setattr("mlx_parallm.media.decode.DECODERS", {})
    text = base64.b64encode(FILE).decode()
    reader = reader_of()
    for provided in (
        reader.from_url(data_url(), param=PARAM, check=check),
        reader.from_base64(text, param=PARAM, check=check),
    ):
        with pytest.raises(InvalidRequestError, match="7 x 5") as refused:
            async with provided:
                pytest.fail("It was taken.")
        assert refused.value.param == PARAM


async def test_errors_of_the_caller_are_not_renamed():
    with pytest.raises(InvalidRequestError) as refused:
        async with reader_of().from_url(data_url(), param=PARAM):
            raise InvalidRequestError("It is too long.", param="messages")
    assert refused.value.param == "messages"


async def test_pixels_count_until_the_caller_is_done():
    reader = reader_of(max_pixels=35, max_pixels_in_flight=70)
    async with reader.from_url(data_url(), param=PARAM):
        assert reader.num_free_pixels == 35
        async with reader.from_url(data_url(), param=PARAM):
            assert reader.num_free_pixels == 0
            third = asyncio.create_task(pixels_of(reader, data_url()))
            await asyncio.sleep(0)
            assert not third.done()
        await third
    assert reader.num_free_pixels == 70


async def test_decoding_is_off_the_event_loop():
    threads: list[threading.Thread] = []

    async def in_thread(work):
        result, thread = await asyncio.to_thread(lambda: (work(), threading.current_thread()))
        threads.append(thread)
        return result

    await pixels_of(ImageReader(MediaLimits(), in_thread=in_thread), data_url())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_pixels_of_a_cancelled_request_count_until_its_thread_ends():
    is_decoding, may_end = asyncio.Event(), asyncio.Event()
    num_calls = 0

    async def in_thread(work):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            is_decoding.set()
            await may_end.wait()
        return work()

    reader = ImageReader(MediaLimits(max_pixels=35, max_pixels_in_flight=35), in_thread=in_thread)
    task = asyncio.create_task(pixels_of(reader, data_url()))
    await is_decoding.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reader.num_free_pixels == 0
    may_end.set()
    assert (await pixels_of(reader, data_url())).shape == (5, 7, 3)
    assert reader.num_free_pixels == 35
