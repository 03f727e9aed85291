"""The pictures of a conversation: where they come from, and how they are prepared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from hashlib import sha256
from typing import Any

from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.config import MediaLimits
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.media.decode import shrunk
from mlx_parallm.media.reader import DecodedPicture, PictureReader
from mlx_parallm.pictures.form import PictureForm
from mlx_parallm.pictures.prepared_cache import PreparedCache
from mlx_parallm.pictures.processor import PictureProcessor, PreparedPicture
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list

SOURCE = "source"
# LOW_SIDE: longest side of a picture of low detail, in pixels.
LOW_SIDE = 512
DATA = "data:"
# PREPARED_BYTES: of the pictures that are kept as models take them.
PREPARED_BYTES = 160 << 20


class Detail(StrEnum):
    """How closely a picture is looked at: OpenAI's ``detail``."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """Where a picture of a request comes from.

    Attributes:
        param: the part of the request that has it, for errors.
        url: of any scheme that ``PictureReader`` takes.
        detail: how closely it is looked at.
        is_base64: True if ``url`` is a file's bytes in base64, without a media type.
    """

    param: str
    url: str
    detail: Detail = Detail.AUTO
    is_base64: bool = False


def picture_part(source: PictureSource) -> dict[str, Any]:
    """Return the part of a message's content that stands for a picture."""
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


def picture_sources(messages: Sequence[Mapping[str, Any]]) -> list[PictureSource]:
    """Return the pictures of a conversation, in order."""
    contents = [message.get("content") for message in messages]
    return [
        part[SOURCE]
        for content in contents
        if is_list(content)
        for part in content
        if part["type"] == "image"
    ]


class Pictures:
    """Reads and prepares the pictures of requests, for all models of a process."""

    def __init__(self, limits: MediaLimits) -> None:
        """``limits`` are those of every request."""
        self._limits = limits
        self._reader = PictureReader(limits, in_thread=in_thread)
        self._processors: dict[Hashable, PictureProcessor] = {}
        self._prepared = PreparedCache(PREPARED_BYTES)

    async def prepare(
        self, sources: Sequence[PictureSource], model: GenerationModel
    ) -> list[PreparedPicture]:
        """Return pictures as a model takes them, in order.

        Raises:
            InvalidRequestError: the model takes none, there are too many, or one cannot be read;
                ``param`` is the picture's.
        """
        form = model.pictures
        if form is None:
            raise InvalidRequestError(
                f"{model.names[0]} does not take pictures.", param=sources[0].param
            )
        self._limits.check_count(len(sources), param="messages")
        return [await self._prepare(source, form) for source in sources]

    async def _prepare(self, source: PictureSource, form: PictureForm) -> PreparedPicture:
        form_key = form.fingerprint, form.family
        key = None
        if source.url.startswith(DATA):
            # Other URLs may have other bytes the next time.
            digest = await in_thread(lambda: sha256(source.url.encode()).digest())
            key = form_key, source.detail, digest
            known = self._prepared.get(key)
            if known is not None:
                return known
        processor = self._processors.setdefault(form_key, PictureProcessor(form))
        read = self._reader.from_base64 if source.is_base64 else self._reader.from_url
        async with read(source.url, param=source.param) as picture:
            prepared = await in_thread(partial(_prepared, processor, picture, source))
        if key is not None:
            self._prepared.put(key, prepared)
        return prepared


def _prepared(
    processor: PictureProcessor, picture: DecodedPicture, source: PictureSource
) -> PreparedPicture:
    pixels = picture.pixels
    if source.detail is Detail.LOW:
        pixels = shrunk(pixels, LOW_SIDE)
    try:
        return processor.prepare(pixels)
    except InvalidRequestError as refusal:
        refusal.param = source.param
        raise
