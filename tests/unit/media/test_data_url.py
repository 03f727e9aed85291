from __future__ import annotations

import base64

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from mlx_parallm.config import MediaLimits
from mlx_parallm.media.data_url import read_base64, read_data_url
from mlx_parallm.types.errors import InvalidRequestError

LIMITS = MediaLimits()


@examples(st.binary(max_size=300))
def test_data_are_read(data):
    text = base64.b64encode(data).decode()
    assert read_data_url(f"data:image/png;base64,{text}", LIMITS) == (data, "png")


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("data:image/jpg", "jpeg"),
        ("DATA:IMAGE/JPEG", "jpeg"),
        ("data:image/webp", "webp"),
        ("data:image/svg+xml", "svg+xml"),
        ("data:image/x-ms-bmp", "bmp"),
    ],
)
def test_the_media_type_says_the_format(header, kind):
    assert read_data_url(f"{header};base64,AAAA", LIMITS) == (bytes(3), kind)


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,",
        "data:;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "data:text/html;base64,AAAA",
        "data:image/png;charset=utf-8;base64,AAAA",
        "data:image/;base64,AAAA",
        " data:image/png;base64,AAAA",
        "data:image/png;base64 ,AAAA",
        "data:image/png;base64\n,AAAA",
        "data:image/" + "a" * 300 + ";base64,AAAA",
    ],
)
def test_other_urls_are_refused(url):
    with pytest.raises(InvalidRequestError, match="must have the form"):
        read_data_url(url, LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "AA",
        "AAA",
        "AA=",
        "AAAA=",
        "=AAA",
        "AA==AA==",
        "AAA AAAA",
        "AAAA\n",
        "AA-_",
        "AAAé",
        "\0AAA",
        "AAAA====",
        "%41AAA",
    ],
)
def test_wrong_base64_is_refused(text):
    with pytest.raises(InvalidRequestError) as refused:
        read_base64(text, LIMITS)
    assert str(refused.value) == "The data are not valid base64."


def test_the_limit_is_exact():
    limits = MediaLimits(max_bytes=100)
    for num_bytes in (98, 99, 100):
        assert len(read_base64(base64.b64encode(bytes(num_bytes)).decode(), limits)) == num_bytes
    for num_bytes in (103, 104, 1000):
        with pytest.raises(InvalidRequestError, match="larger than 100 bytes"):
            read_base64(base64.b64encode(bytes(num_bytes)).decode(), limits)
