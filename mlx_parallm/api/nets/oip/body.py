"""Reads bodies: compressed or not, a JSON object and the bytes of tensors behind it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from mlx_parallm.api.http.body_budget import held_body
from mlx_parallm.api.http.json_body import ignored_names
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.uploads import validated
from mlx_parallm.api.nets.long_lists import parse_with_arrays
from mlx_parallm.api.nets.oip.schema import InferRequest
from mlx_parallm.types.errors import InvalidRequestError, RequestTooLargeError
from mlx_parallm.types.json_values import is_list, is_object

#: ``HEADER_LENGTH``: the header with the bytes of the JSON object, if tensors are behind it.
HEADER_LENGTH = "Inference-Header-Content-Length"
CONTENT_ENCODING = "Content-Encoding"
#: ``DATA``: the field of an input with its numbers.
DATA = "data"
# MAX_LENGTH_DIGITS: a header may have any length, and Python refuses to read thousands of digits.
MAX_LENGTH_DIGITS = 18
# _WINDOW_BITS: zlib's argument by coding.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_NOT_ENDED = "ends too early"
# LEVEL: floats hardly become smaller by more effort.
LEVEL = 1


@dataclass(frozen=True, slots=True)
class InferBody:
    """A body.

    Attributes:
        fields: its object.
        behind: the bytes behind the object.
        ignored: names of fields that nothing reads.
    """

    fields: InferRequest
    behind: memoryview
    ignored: Collection[str]


def split_body(body: bytes, header: str | None) -> InferBody:
    """Return a body.

    Args:
        body: without compression.
        header: the value of ``HEADER_LENGTH``; None if the body is the object alone.

    Raises:
        InvalidRequestError: the header is wrong, or there is no such object.
    """
    length = len(body) if header is None else _header_length(header, len(body))
    view = memoryview(body)
    text = body if length == len(body) else bytes(view[:length])
    try:
        content = parse_with_arrays(text, _places)
    except InvalidRequestError as problem:
        if header is None or problem.code != "invalid_json":
            raise
        raise InvalidRequestError(
            f"{problem} {HEADER_LENGTH} says that {length} bytes of it are JSON.",
            param=HEADER_LENGTH,
        ) from None
    if not is_object(content):
        raise InvalidRequestError("The body must be a JSON object.")
    fields = validated(InferRequest, content)
    return InferBody(fields, view[length:], ignored_names(InferRequest, content))


def _places(content: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where an object may have arrays; see ``parse_with_arrays``."""
    inputs = content.get("inputs") if is_object(content) else None
    for tensor in inputs if is_list(inputs) else ():
        if is_object(tensor) and DATA in tensor:
            yield tensor, DATA


def _header_length(header: str, num_bytes: int) -> int:
    is_number = header.isascii() and header.isdecimal() and len(header) <= MAX_LENGTH_DIGITS
    if is_number and 0 < int(header) <= num_bytes:
        return int(header)
    raise InvalidRequestError(
        f"{HEADER_LENGTH} must be the bytes of the JSON object, which a body of {num_bytes} bytes "
        f"begins with, and not {header[:MAX_LENGTH_DIGITS]!r}.",
        param=HEADER_LENGTH,
    )


async def plain_body(request: Request) -> bytes:
    """Return the body without its compression.

    Raises:
        InvalidRequestError: it is compressed in another way, or is broken.
        RequestTooLargeError: it becomes larger than the route allows.
        OverloadedError: the client's bodies take too much memory.
    """
    body = await request.body()
    coding = request.headers.get(CONTENT_ENCODING, "identity").strip().lower()
    if coding == "identity":
        return body
    if coding not in _WINDOW_BITS:
        raise InvalidRequestError(
            f"{CONTENT_ENCODING} must be gzip or deflate.", param=CONTENT_ENCODING
        )
    held = held_body(request.scope)
    larger = await in_thread(lambda: uncompressed(body, coding, held.max_size))
    held.expand(len(larger))
    return larger


def uncompressed(body: bytes, coding: str, max_size: int) -> bytes:
    """Return what was compressed.

    Args:
        body: the compressed bytes, all of them.
        coding: "gzip" or "deflate" (zlib's format, RFC 9110).
        max_size: most bytes of the result.

    Raises:
        InvalidRequestError: it is not of this coding, or something follows it.
        RequestTooLargeError: the result is larger.
    """
    reader = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        # One byte more shows that the result is too large.
        result = reader.decompress(body, max_size + 1)
    except zlib.error as problem:
        raise _not_coded(coding, str(problem)) from None
    if len(result) > max_size:
        raise RequestTooLargeError(f"The body becomes larger than {max_size} bytes.")
    if not reader.eof:
        raise _not_coded(coding, _NOT_ENDED)
    if reader.unused_data:
        raise _not_coded(coding, "something follows its end")
    return result


def _not_coded(coding: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body is not {coding}: {why}.", param=CONTENT_ENCODING)


COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda content: gzip.compress(content, LEVEL, mtime=0),
    "deflate": lambda content: zlib.compress(content, LEVEL),
}


def wanted_coding(headers: Mapping[str, Any]) -> str | None:
    """Return the coding of the answer; None for none.

    HTTP libraries list all that they can read. A client that lists a single coding wants it.
    """
    listed = headers.get("accept-encoding", "").strip().lower()
    return listed if listed in COMPRESSORS else None
