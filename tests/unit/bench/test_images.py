"""Random images of a workload."""

from __future__ import annotations

import random
from base64 import b64decode
from typing import Any

import pytest

from mlx_parallm.bench.images import ImageSize, random_png
from mlx_parallm.bench.workload import Lengths, Workload, plan_requests
from mlx_parallm.media.decode import decode_image
from mlx_parallm.media.formats.sniffing import read_file


@pytest.mark.parametrize("size", [ImageSize(1, 1), ImageSize(40, 17), ImageSize(300, 7)])
def test_the_file_can_be_read(size: ImageSize) -> None:
    pixels = decode_image(read_file(random_png(random.Random(1), size)))
    assert pixels.shape == (size.height, size.width, 3)
    assert ImageSize.parse(str(size)) == size
    other = decode_image(read_file(random_png(random.Random(2), size)))
    assert (pixels != other).any()


@pytest.mark.parametrize("text", ["640", "0x4", "axb", "4x99999"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text}|int"):
        ImageSize.parse(text)


def planned(**options: Any) -> list[Any]:
    workload = Workload(
        endpoint="chat",
        num_requests=4,
        prompt_lengths=Lengths.parse("3"),
        output_lengths=Lengths.parse("2"),
        words=("a", "b", "c"),
        image_size=ImageSize(20, 10),
        **options,
    )
    contents = [request.body["messages"][0]["content"] for request in plan_requests(workload)]
    return [content for content in contents if content]


def urls(contents: list[Any]) -> list[str]:
    parts = [part for content in contents for part in content]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_requests_have_images_before_their_text() -> None:
    contents = planned(num_images=2)
    assert [[part["type"] for part in content] for content in contents] == [
        ["image_url", "image_url", "text"]
    ] * 4
    assert [content[2]["text"] for content in contents] == planned()
    shown = urls(contents)
    assert len(set(shown)) == 8
    assert shown == urls(planned(num_images=2))
    assert read_file(b64decode(shown[0].partition(",")[2])).width == 20


def test_a_few_images_are_taken_in_turn() -> None:
    shown = urls(planned(num_images=1, num_distinct_images=3))
    assert shown[0] == shown[3]
    assert len(set(shown)) == 3


def test_only_chats_have_images() -> None:
    workload = Workload(
        num_requests=1,
        prompt_lengths=Lengths.parse("1"),
        output_lengths=Lengths.parse("1"),
        words=("a",),
        num_images=1,
    )
    with pytest.raises(ValueError, match="chat"):
        plan_requests(workload)
