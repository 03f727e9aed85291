"""The images of a conversation: where they come from, and how they are prepared."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from hashlib import sha256
from typing import Annotated, Any

from pydantic import Field, StrictStr

from mlx_parallm.api.http.offload import current_client, in_thread
from mlx_parallm.fairness import SharedBudget
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.processor import (
    AS_CONFIGURED,
    PIXELS_PARAM,
    ImageProcessor,
    PixelRange,
    PreparedImage,
)
from mlx_parallm.media.decode import shrunk, shrunk_size
from mlx_parallm.media.fetch import Fetcher
from mlx_parallm.media.pdf import PdfReader
from mlx_parallm.media.reader import CheckSize, DecodedImage, ImageReader
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from mlx_parallm.types.json_values import is_list
from mlx_parallm.types.token_limit import TokenLimit

SOURCE = "source"
# LOW_SIDE: longest side of an image of low detail, in pixels.
LOW_SIDE = 512
DATA = "data:"
# PREPARED_BYTES: of the images that are kept as models take them.
PREPARED_BYTES = 160 << 20
# BODY_BYTES: of the images of all prompts of a body, as models take them, each counted once.
BODY_BYTES = 2 << 30
# LEAST_HELD_BYTES, MOST_HELD_BYTES: bounds on the images of all requests as models take them,
# which may take a quarter of the machine's memory.
LEAST_HELD_BYTES, MOST_HELD_BYTES = 2 << 30, 16 << 30
# MAX_URLS: of a prompt; --max-images-per-request is the operator's limit.
MAX_URLS = 1024
ImageUrls = Annotated[list[StrictStr], Field(max_length=MAX_URLS, fail_fast=True)]
MIN_PIXELS, MAX_PIXELS = "min_pixels", "max_pixels"


class Detail(StrEnum):
    """Resolution at which an image is read: OpenAI's ``detail``."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """Where an image of a request comes from.

    Attributes:
        param: the part of the request that has it, for errors.
        url: of any scheme that ``ImageReader`` takes.
        detail: how closely it is looked at.
        is_base64: True if ``url`` is a file's bytes in base64.
        media_type: of base64, if the file must be of this type; see ``ImageReader.from_base64``.
    """

    param: str
    url: str
    detail: Detail = Detail.AUTO
    is_base64: bool = False
    media_type: str | None = None


def image_part(source: ImageSource) -> dict[str, Any]:
    """Return the part of a message's content that stands for an image."""
    return {"type": "image", SOURCE: source}


def detail_of(value: Any, param: str) -> Detail:
    """Return a body's ``detail``.

    Raises:
        InvalidRequestError: it is no such word.
    """
    if value is None:
        return Detail.AUTO
    if value not in list(Detail):
        raise InvalidRequestError(f"{param} must be one of {', '.join(Detail)}.", param=param)
    return Detail(value)


def image_sources(messages: Sequence[Mapping[str, Any]]) -> list[ImageSource]:
    """Return the images of a conversation, in order."""
    contents = [message.get("content") for message in messages]
    return [
        part[SOURCE]
        for content in contents
        if is_list(content)
        for part in content
        if part["type"] == "image"
    ]


def named_sources(entry: Any, where: str) -> list[ImageSource]:
    """Return the images of a field that has a URL or base64, several of these, or nothing.

    Raises:
        InvalidRequestError: an entry is neither; ``param`` is its place in the field.
    """
    urls: Sequence[Any] = [] if entry is None else entry if is_list(entry) else [entry]
    sources: list[ImageSource] = []
    for place, url in enumerate(urls):
        param = f"{where}[{place}]" if is_list(entry) else where
        if not isinstance(url, str):
            raise InvalidRequestError(f"{param} must be a URL or base64.", param=param)
        # Base64 has no colon, and every URL has one.
        sources.append(ImageSource(param=param, url=url, is_base64=":" not in url))
    return sources


def pixel_range_of(kwargs: Mapping[str, Any] | None) -> PixelRange:
    """Return what vLLM's ``mm_processor_kwargs`` say about the size of images.

    Raises:
        InvalidRequestError: they have anything but positive ``min_pixels`` and ``max_pixels``.
    """
    kwargs = kwargs or {}
    for name, value in kwargs.items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name not in (MIN_PIXELS, MAX_PIXELS) or not is_count:
            raise InvalidRequestError(
                f"{PIXELS_PARAM} may have the numbers {MIN_PIXELS} and {MAX_PIXELS}, not "
                f"{name[:40]!r}: the other settings of an image processor are the model's.",
                param=PIXELS_PARAM,
            )
    return PixelRange(kwargs.get(MIN_PIXELS), kwargs.get(MAX_PIXELS))


class Images:
    """Reads and prepares the images of requests, for all models of a process."""

    def __init__(self, limits: MediaLimits, *, separates_clients: bool = False) -> None:
        """Prepare.

        Args:
            limits: those of every request.
            separates_clients: True if no client finds what was prepared for another's request, not
                even by the time that it takes.
        """
        self._limits = limits
        self._separates_clients = separates_clients
        fetcher = Fetcher(limits)
        self._reader = ImageReader(limits, fetcher=fetcher, in_thread=in_thread, client=_client)
        self.pdfs = PdfReader(limits, fetcher, in_thread=in_thread, client=_client)
        self._processors: dict[Hashable, ImageProcessor] = {}
        self._prepared = PreparedCache(PREPARED_BYTES)
        self._budget = PreparedBudget(max_held_bytes())

    async def prepare(
        self,
        sources: Sequence[ImageSource],
        model: GenerationModel,
        pixel_range: PixelRange = AS_CONFIGURED,
        *,
        is_counted: bool = False,
    ) -> list[PreparedImage]:
        """Return images as a model takes them, in order.

        Args:
            sources: of one prompt.
            model: reads it.
            pixel_range: to which images are resized.
            is_counted: True if tokens are counted only: images have no arrays then, and may have
                more tokens than the model's context.

        Raises:
            InvalidRequestError: the model takes none, or none of such sizes, there are too many, or
                one cannot be read; ``param`` is the image's.
            ContextLengthError: they have more tokens than the model's context.
            OverloadedError: requests hold too many images.
        """
        form = model.images
        if form is None:
            raise InvalidRequestError(
                f"{model.names[0]} does not take images.", param=sources[0].param
            )
        last = sources[: self._limits.max_images + 1][-1]
        self._limits.check_count(len(sources), param=last.param)
        form_key = form.fingerprint, form.family
        processor = self._processors.setdefault(form_key, ImageProcessor(form))
        if pixel_range != AS_CONFIGURED:
            await in_thread(partial(processor.check, pixel_range))
        key = form_key, pixel_range
        prepared: list[PreparedImage] = []
        room = _Room(None if is_counted else model.info.max_model_len)
        client = current_client()
        for source in sources:
            self._budget.check(client)
            image = await self._prepare(source, processor, pixel_range, key, room)
            prepared.append(replace(image, arrays={}) if is_counted else image)
            room.take(sum(image.written.runs))
        return prepared

    async def prepare_each(
        self,
        prompts: Iterable[tuple[Sequence[ImageSource], GenerationModel]],
        pixel_range: PixelRange = AS_CONFIGURED,
    ) -> list[list[PreparedImage]]:
        """Return the images of each prompt of a body; see ``prepare``.

        Raises:
            InvalidRequestError: see there; or they take too much memory together.
        """
        prepared: list[list[PreparedImage]] = []
        sizes: dict[str, int] = {}
        for sources, model in prompts:
            images = await self.prepare(sources, model, pixel_range) if sources else []
            sizes |= {image.content: image.nbytes for image in images}
            if sum(sizes.values()) > BODY_BYTES:
                raise InvalidRequestError(
                    "The images of this request take more than "
                    f"{BODY_BYTES >> 30} GiB as the model takes them; send fewer prompts at once.",
                    param=sources[0].param,
                )
            prepared.append(images)
        return prepared

    async def _prepare(
        self,
        source: ImageSource,
        processor: ImageProcessor,
        pixel_range: PixelRange,
        processing: Hashable,
        room: _Room,
    ) -> PreparedImage:
        key = None
        if source.is_base64 or source.url.startswith(DATA):
            # Other URLs may have other bytes the next time.
            digest = await in_thread(lambda: sha256(source.url.encode()).digest())
            owner = current_client() if self._separates_clients else None
            key = owner, processing, source.detail, source.media_type, digest
            known = self._prepared.get(key)
            if known is not None:
                return known

        def check(width: int, height: int) -> None:
            if source.detail is Detail.LOW:
                width, height = shrunk_size(width, height, LOW_SIDE)
            else:
                room.check(processor.least_tokens(width, height, pixel_range))
            self._limits.check_resized(processor.resized_pixels(width, height, pixel_range))

        async with self._read(source, check) as image:
            prepared = await in_thread(partial(_prepared, processor, image, source, pixel_range))
        self._budget.hold(prepared, current_client())
        if key is not None:
            self._prepared.put(key, prepared)
        return prepared

    def _read(
        self, source: ImageSource, check: CheckSize
    ) -> AbstractAsyncContextManager[DecodedImage]:
        if source.is_base64:
            return self._reader.from_base64(
                source.url, source.media_type, param=source.param, check=check
            )
        return self._reader.from_url(source.url, param=source.param, check=check)


def _client() -> str | None:
    return current_client() or None


class _Room:
    """Counts the tokens of a prompt's images within the context.

    Images that do not fit are refused before they are decoded: they may take gigabytes.
    """

    def __init__(self, most: int | None) -> None:
        """``most`` is the context's length; None: there is no bound."""
        self._limit = TokenLimit(most=most)
        self._taken = 0

    def check(self, num_tokens: int) -> None:
        """Refuse an image that does not fit behind those before it.

        Raises:
            ContextLengthError: it has too many tokens.
        """
        total = self._taken + num_tokens
        if self._limit.most is not None and total > self._limit.most:
            raise self._limit.refusal(f"at least {total}")

    def take(self, num_tokens: int) -> None:
        """Count an image; see ``check``."""
        self.check(num_tokens)
        self._taken += num_tokens


def _prepared(
    processor: ImageProcessor,
    image: DecodedImage,
    source: ImageSource,
    pixel_range: PixelRange,
) -> PreparedImage:
    pixels = image.pixels
    if source.detail is Detail.LOW:
        pixels = shrunk(pixels, LOW_SIDE)
    try:
        return processor.prepare(pixels, pixel_range)
    except InvalidRequestError as refusal:
        refusal.param = source.param
        raise


class PreparedCache:
    """Keeps prepared images by what they were prepared from, the latest used ones."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` bounds their arrays."""
        self._max_bytes = max_bytes
        self._images: OrderedDict[Hashable, PreparedImage] = OrderedDict()
        #: The bytes of all arrays that are kept.
        self.num_bytes = 0

    def get(self, key: Hashable) -> PreparedImage | None:
        """Return an image; None if it is not kept."""
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def put(self, key: Hashable, image: PreparedImage) -> None:
        """Keep an image, unless it alone is too large; those used longest ago make room."""
        if key in self._images or image.nbytes > self._max_bytes:
            return
        self._images[key] = image
        self.num_bytes += image.nbytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._images.popitem(last=False)
            self.num_bytes -= dropped.nbytes


def max_held_bytes() -> int:
    """Return the most bytes of images that requests may hold as models take them."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return LEAST_HELD_BYTES
    return min(max(memory // 4, LEAST_HELD_BYTES), MOST_HELD_BYTES)


class PreparedBudget:
    """Counts prepared images until nothing holds them; one client may have half of the bound.

    Its methods are called on one event loop; images may be dropped on any thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._held = SharedBudget(max_bytes)
        # Bytes and clients of arrays that were dropped: appending needs no lock.
        self._dropped: deque[tuple[int, str]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays that are held now."""
        self._release_dropped()
        return self._held.num_taken

    def check(self, client: str) -> None:
        """Refuse a further image of a client.

        Raises:
            OverloadedError: all requests, or this client's, hold too many.
        """
        self._release_dropped()
        if not self._held.has_room(1, client):
            raise OverloadedError("Requests hold too many images; try again when some have ended.")

    def hold(self, image: PreparedImage, client: str) -> None:
        """Count an image of a client until its arrays are dropped."""
        for array in image.arrays.values():
            num_bytes = len(array.data)
            self._held.take(num_bytes, client)
            ending = weakref.finalize(array, self._dropped.append, (num_bytes, client))
            ending.atexit = False

    def _release_dropped(self) -> None:
        while self._dropped:
            self._held.release(*self._dropped.popleft())
