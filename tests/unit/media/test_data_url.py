from __future__ import annotations

import base64
import textwrap
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from mlx_parallm.media.reader import format_of, read_base64, read_data_url, read_strict_base64
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError

LIMITS = MediaLimits()


#: How clients write base64: as it is, in lines, without padding, escaped for a URL.
FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "wrapped": lambda text: "\r\n".join(textwrap.wrap(text, 76)) + "\n",
    "indented": lambda text: "".join(f"  {line}\n" for line in textwrap.wrap(text, 60)),
    "unpadded": lambda text: text.rstrip("="),
    "unpadded and wrapped": lambda text: "\n".join(textwrap.wrap(text.rstrip("="), 64)),
}


@pytest.mark.parametrize("form", FORMS)
@examples(data=st.binary(max_size=300))
def test_data_are_read_in_every_form(form, data):
    text = FORMS[form](base64.b64encode(data).decode())
    assert read_base64(text, LIMITS) == data
    for written in (text, quote(text, safe="")):
        assert read_data_url(f"data:image/png;base64,{written}", LIMITS) == data


@pytest.mark.parametrize(
    "header",
    [
        *("data:image/jpg", "DATA:IMAGE/JPEG", "data:image/svg+xml", "data:image/x-ms-bmp"),
        *("data:image/png;charset=utf-8", "data:image/png;name=a b.png", "data:image/png;n=a%20b"),
        *("data:application/octet-stream", "data:", "data:image/", "data:;charset=US-ASCII"),
    ],
)
def test_the_label_is_not_read(header):
    assert read_data_url(f"{header};base64,AAAA", LIMITS) == bytes(3)


@pytest.mark.parametrize(
    ("media_type", "kind"),
    [
        ("image/jpg", "jpeg"),
        ("IMAGE/JPEG", "jpeg"),
        ("image/svg+xml", "svg+xml"),
        ("image/x-ms-bmp", "bmp"),
        ("png", "png"),
    ],
)
def test_a_media_type_says_the_format(media_type, kind):
    assert format_of(media_type) == kind


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "data:image/png;base64;charset=utf-8,AAAA",
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
        read_strict_base64(text, LIMITS)
    assert str(refused.value) == "The data are not valid base64."


@pytest.mark.parametrize("text", ["A", "AAAAA", "AA==AA==", "=AAA", "AA-_", "AAé", "\0AAA"])
def test_what_is_not_base64_is_refused_in_every_form(text):
    with pytest.raises(InvalidRequestError, match="not valid base64"):
        read_base64(text, LIMITS)


@pytest.mark.parametrize("read_base64", [read_base64, read_strict_base64])
def test_the_limit_is_exact(read_base64):
    limits = MediaLimits(max_bytes=100)
    for num_bytes in (98, 99, 100):
        assert len(read_base64(base64.b64encode(bytes(num_bytes)).decode(), limits)) == num_bytes
    for num_bytes in (103, 104, 1000):
        with pytest.raises(InvalidRequestError, match="larger than 100 bytes"):
            read_base64(base64.b64encode(bytes(num_bytes)).decode(), limits)
