"""The one way from what a request says about an image to its pixels."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from urllib.parse import unquote

from mlx_parallm.fairness import Client, SharedBudget
from mlx_parallm.media.decode import Pixels, decode_image, read_image
from mlx_parallm.media.fetch import Fetcher
from mlx_parallm.media.formats.stored import StoredImage
from mlx_parallm.media.local_files import SCHEME as FILE_SCHEME
from mlx_parallm.media.local_files import LocalFiles
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError

T = TypeVar("T")
#: ``CheckSize``: takes width and height of an image as it is stored, and may refuse it.
CheckSize = Callable[[int, int], None]
DATA_SCHEME = "data:"
# _HEADER: the part of a URL before the comma (RFC 2397). Its media type and parameters are not
# read: clients label images wrongly, and the file's first bytes say what it is.
_HEADER = re.compile(r"data:[^,\r\n]*;base64", re.IGNORECASE)
# MAX_HEADER_CHARS: how far a comma is searched.
MAX_HEADER_CHARS = 256
#: Media types that say a format otherwise than by its name.
ALIASES = {"jpg": "jpeg", "pjpeg": "jpeg", "apng": "png", "x-ms-bmp": "bmp", "x-bmp": "bmp"}
NOT_A_DATA_URL = "The URL must have the form data:image/<format>;base64,<data>."


class RunInThread(Protocol):
    """Runs work that would keep the event loop busy."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return the result of the work."""
        ...


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An image as the models see it.

    Attributes:
        pixels: uint8 [height, width, 3].
        format: the file's, such as "png".
    """

    pixels: Pixels
    format: str


class ImageReader:
    """Gets and decodes the images of requests, off the event loop.

    Errors of an image are InvalidRequestErrors whose ``param`` is the part of the request that
    the caller names. Use an image within the ``async with`` of its method, one at a time: its
    pixels count among those of the process until then.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        fetcher: Fetcher | None = None,
        in_thread: RunInThread = asyncio.to_thread,
        client: Callable[[], Client] = lambda: None,
    ) -> None:
        """Prepare.

        Args:
            limits: those of every image, and of all together.
            fetcher: gets images by HTTP; None makes one with the same limits.
            in_thread: runs work on a thread.
            client: returns the client of the request that runs.
        """
        self._limits = limits
        self._fetcher = fetcher or Fetcher(limits)
        self._files = LocalFiles(limits)
        self._in_thread = in_thread
        self._client = client
        self._budget = SharedBudget(limits.max_pixels_in_flight)

    @property
    def num_free_pixels(self) -> int:
        """Pixels that could be decoded now."""
        return self._budget.num_free

    @asynccontextmanager
    async def from_url(
        self, url: str, *, param: str, check: CheckSize | None = None
    ) -> AsyncGenerator[DecodedImage]:
        """Provide the image of a ``data:``, ``http(s):`` or ``file:`` URL.

        Args:
            url: where it is.
            param: the part of the request that has it.
            check: called on a thread with width and height before pixels are decoded; may refuse.

        Raises:
            InvalidRequestError: there is none within the limits.
            OverloadedError: the process holds too many bytes of fetched images.
        """
        async with contextlib.AsyncExitStack() as stack:
            with naming(param):
                scheme = url[: len(DATA_SCHEME)].lower()
                if scheme == DATA_SCHEME:
                    work = partial(self._from_data_url, url)
                elif scheme == FILE_SCHEME:
                    work = partial(self._from_file, url)
                else:
                    data = await stack.enter_async_context(
                        self._fetcher.fetched(url, self._client())
                    )
                    work = partial(read_image, data, self._limits)
                image = await stack.enter_async_context(self._decoded(work, check))
            yield image

    @asynccontextmanager
    async def from_base64(
        self,
        text: str,
        media_type: str | None = None,
        *,
        param: str,
        check: CheckSize | None = None,
    ) -> AsyncGenerator[DecodedImage]:
        """Provide the image of a base64 text.

        Args:
            text: the base64.
            media_type: if given, the text must be base64 without line breaks and with padding, and
                the file of this type.
            param: see ``from_url``.
            check: see ``from_url``.

        Raises:
            InvalidRequestError: there is none within the limits, or it is of another type.
        """
        async with contextlib.AsyncExitStack() as stack:
            with naming(param):
                decoded = self._decoded(partial(self._from_base64, text, media_type), check)
                image = await stack.enter_async_context(decoded)
            yield image

    @asynccontextmanager
    async def from_bytes(self, data: bytes, *, param: str) -> AsyncGenerator[DecodedImage]:
        """Provide the image of a file's bytes.

        Raises:
            InvalidRequestError: there is none within the limits.
        """
        async with contextlib.AsyncExitStack() as stack:
            with naming(param):
                decoded = self._decoded(partial(read_image, data, self._limits))
                image = await stack.enter_async_context(decoded)
            yield image

    @asynccontextmanager
    async def _decoded(
        self, read: Callable[[], StoredImage], check: CheckSize | None = None
    ) -> AsyncGenerator[DecodedImage]:
        """Provide the pixels of what ``read`` returns, when there is room for them."""

        def checked() -> StoredImage:
            stored = read()
            if check is not None:
                check(stored.width, stored.height)
            return stored

        stored = await self._in_thread(checked)
        num_pixels, kind = stored.width * stored.height, stored.format
        product = self._budget.product(
            num_pixels, self._client(), partial(self._in_thread, partial(decode_image, stored))
        )
        # The file is not needed while its pixels are used.
        del stored
        async with product as pixels:
            yield DecodedImage(pixels, kind)

    def _from_data_url(self, url: str) -> StoredImage:
        return read_image(read_data_url(url, self._limits), self._limits)

    def _from_base64(self, text: str, media_type: str | None) -> StoredImage:
        if media_type is None:
            return read_image(read_base64(text, self._limits), self._limits)
        image = read_image(read_strict_base64(text, self._limits), self._limits)
        return _of_format(image, format_of(media_type))

    def _from_file(self, url: str) -> StoredImage:
        return read_image(self._files.read(url), self._limits)


@contextlib.contextmanager
def naming(param: str) -> Generator[None]:
    """Let errors name the part of the request that they are about."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = param
        raise


def _of_format(image: StoredImage, kind: str) -> StoredImage:
    """Return an image that has the format that its media type says."""
    if image.format != kind:
        raise InvalidRequestError(
            f"The image is of the type image/{image.format}, not of the media type that the "
            "request says."
        )
    return image


def read_data_url(url: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a ``data:`` URL.

    Raises:
        InvalidRequestError: it is not a base64 URL, or too long.
    """
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    if comma < 0 or not _HEADER.fullmatch(url, 0, comma):
        raise InvalidRequestError(NOT_A_DATA_URL)
    text = url[comma + 1 :]
    return read_base64(unquote(text, "ascii") if "%" in text else text, limits)


def format_of(media_type: str) -> str:
    """Return the format of an image's media type."""
    subtype = media_type.lower().removeprefix("image/")
    return ALIASES.get(subtype, subtype)


def read_base64(text: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a text in base64, which may have line breaks and lack its padding.

    Raises:
        InvalidRequestError: it is not base64, or too long.
    """
    digits = "".join(text.split()).rstrip("=")
    return read_strict_base64(digits + "=" * (-len(digits) % 4), limits)


def read_strict_base64(text: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a text in base64, without line breaks and with padding.

    Raises:
        InvalidRequestError: it is not base64, or too long.
    """
    limits.check_bytes(len(text) // 4 * 3 - 2)
    # Python's strict mode still takes padding after complete groups.
    is_padded = len(text) % 4 == 0 and not text.endswith("===")
    try:
        if is_padded:
            return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        # Its message could repeat characters of the text.
        pass
    raise InvalidRequestError("The data are not valid base64.")
