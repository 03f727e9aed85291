"""Images of a prompt are prepared until they do not fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.api.http.offload import TextThreads
from mlx_parallm.api.turns.images import Detail, Images, ImageSource
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError, OverloadedError
from tests.golden_images import GoldenImages, read_vision, write_vision
from tests.unit.media.images import file_of, noise
from tests.unit.media.test_reader import data_url

NUM_TOKENS = 16


@pytest.fixture
def model(tmp_path: Path) -> Any:
    golden = read_vision("llava")
    form = GoldenImages(golden, write_vision(tmp_path, golden)).form
    info = SimpleNamespace(max_model_len=2 * NUM_TOKENS)
    return SimpleNamespace(names=("m",), images=form, info=info)


def sources(count: int, *urls: str) -> list[ImageSource]:
    seen = [data_url(file_of(noise(size=(40, 50), seed=seed))) for seed in range(count)]
    return [ImageSource(param=f"[{i}]", url=url) for i, url in enumerate([*seen, *urls])]


async def test_images_beyond_the_context_are_not_looked_at(model: Any) -> None:
    images = Images(MediaLimits())
    assert len(await images.prepare(sources(2), model)) == 2
    with pytest.raises(ContextLengthError, match=r"32 tokens.*at least 48 tokens"):
        await images.prepare(sources(3, "not an image"), model)


async def test_images_that_are_counted_have_no_pixels(model: Any) -> None:
    counted = await Images(MediaLimits()).prepare(sources(4), model, is_counted=True)
    assert [sum(each.written.runs) for each in counted] == [NUM_TOKENS] * 4
    assert all(each.nbytes == 0 for each in counted)


async def test_no_more_images_are_prepared_than_memory_holds(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.api.turns.images.max_held_bytes", lambda: 40_000)
    monkeypatch.setattr("mlx_parallm.api.turns.images.PREPARED_BYTES", 0)
    images = Images(MediaLimits())
    held = await images.prepare(sources(2), model)
    with pytest.raises(OverloadedError):
        await images.prepare(sources(3)[2:], model)
    del held
    # The thread that made an image may hold it a moment longer than its task.
    while True:
        try:
            assert await images.prepare(sources(3)[2:], model)
        except OverloadedError:
            await asyncio.sleep(0)
        else:
            break


async def test_a_image_that_is_refused_is_named(model: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await Images(MediaLimits()).prepare(sources(1, "not an image"), model)
    assert refused.value.param == "[1]"


@pytest.mark.parametrize("separates", [True, False])
async def test_clients_find_prepared_images_of_their_scope_only(
    model: Any, separates: bool
) -> None:
    images, threads = Images(MediaLimits(), separates_clients=separates), TextThreads(2)

    async def prepare(client: str) -> PreparedImage:
        with threads.serving(client):
            (image,) = await images.prepare(sources(1), model)
        return image

    first = await prepare("one")
    assert await prepare("one") is first
    assert (await prepare("two") is first) != separates


async def test_the_first_image_beyond_the_limit_is_named(model: Any) -> None:
    with pytest.raises(InvalidRequestError, match="4 images; at most 2") as refused:
        await Images(MediaLimits(max_images=2)).prepare(sources(4), model)
    assert refused.value.param == "[2]"


@pytest.mark.parametrize("detail", Detail)
async def test_a_image_that_would_be_resized_to_too_many_pixels_is_named(
    model: Any, detail: Detail
) -> None:
    url = data_url(file_of(noise(size=(200, 1))))
    source = ImageSource(param="[0]", url=url, detail=detail)
    # The golden model's shorter sides have 32 pixels.
    resized = 32 * 32 * 200
    assert len(await Images(MediaLimits(max_pixels=resized)).prepare([source], model)) == 1
    with pytest.raises(InvalidRequestError, match=f"resize the image to {resized}") as refused:
        await Images(MediaLimits(max_pixels=resized - 1)).prepare([source], model)
    assert refused.value.param == "[0]"


async def test_base64_is_strict_where_its_media_type_counts(model: Any) -> None:
    text = data_url(file_of(noise(size=(40, 50)))).partition(",")[2]

    async def prepare(text: str, media_type: str | None) -> PreparedImage:
        source = ImageSource(param="[0]", url=text, is_base64=True, media_type=media_type)
        (image,) = await images.prepare([source], model)
        return image

    images = Images(MediaLimits())
    for written in (text, f"{text}\n", text.rstrip("=")):
        first = await prepare(written, None)
        assert await prepare(written, None) is first
    await prepare(text, "image/png")
    for written, media_type in ((text, "image/jpeg"), (f"{text}\n", "image/png")):
        with pytest.raises(InvalidRequestError):
            await prepare(written, media_type)
