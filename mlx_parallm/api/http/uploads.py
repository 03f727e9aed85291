"""Large bodies of tensors: received as they come, parsed away from the event loop.

An upload is the bytes of a safetensors file with some fields beside it, sent in one of three ways:
as the body itself with the fields in the query or in headers, as a form with a file, or as JSON
with the file in base64.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from mlx_parallm.api.http.errors import describe, param_of
from mlx_parallm.api.http.json_body import parse_json
from mlx_parallm.api.http.multipart import FormReader
from mlx_parallm.types.content import PIECE_BYTES, Buffer
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

T = TypeVar("T", bound=BaseModel)

RAW_TYPES = ("application/octet-stream", "application/x-safetensors")
FORM_TYPE = "multipart/form-data"
# MAX_FIELD_BYTES: room for an adapter's config with a pattern for every module.
MAX_FIELD_BYTES = 64 * 1024
# BACKLOG_BYTES: received bytes that may wait to be hashed, beside the body that has them too.
BACKLOG_BYTES = 64 << 20


class BodyDigest:
    """The SHA-256 of a body, computed on a thread while the body is received.

    The receiver never waits. What is not hashed at the end of the body is hashed afterwards, until
    ``close``: a body that is kept longer than its request would exceed the memory for bodies.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "body-digest")
        self._pieces: list[Buffer] = []
        self._num_bytes = 0
        # Bytes from the beginning that the thread was given, and those that it has hashed.
        self._given = 0
        self._hashed = 0
        self._is_behind = False
        self._is_closed = False

    def add(self, piece: Buffer) -> None:
        """Take the next piece of the body."""
        if self._is_behind:
            return
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes < PIECE_BYTES:
            return
        pieces, self._pieces = self._pieces, []
        if self._given - self._hashed > BACKLOG_BYTES:
            self._is_behind = True
            return
        self._thread.submit(self._hash, pieces)
        self._given += self._num_bytes
        self._num_bytes = 0

    def finish(self, *bodies: Buffer) -> Future[str | None]:
        """Return what becomes the digest, in hex, of whole bodies, one behind the other.

        The first one begins with the pieces that were taken; none may change any more. The digest
        becomes None if this is closed before it is known.
        """
        first, *others = bodies
        return self._thread.submit(self._end, [memoryview(first)[self._given :], *others])

    def close(self) -> None:
        """Let go of all bodies after the piece that is being hashed."""
        self._is_closed = True
        self._thread.shutdown(wait=False)

    def _hash(self, bodies: Iterable[Buffer]) -> None:
        for body in bodies:
            view = memoryview(body)
            for start in range(0, len(view), PIECE_BYTES):
                if self._is_closed:
                    return
                piece = view[start : start + PIECE_BYTES]
                self._digest.update(piece)
                self._hashed += len(piece)

    def _end(self, rest: Iterable[Buffer]) -> str | None:
        self._hash(rest)
        return None if self._is_closed else self._digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A body that has been received.

    Attributes:
        kind: its content type.
        body: all that is not in ``fields``: the tensors, or a whole JSON body.
        fields: from the query, from headers and from a form.
        began_s, ended_s: when its first and last bytes came, by ``time.perf_counter``.
    """

    kind: str
    body: bytearray
    fields: Mapping[str, str]
    began_s: float
    ended_s: float


async def receive(
    request: Request, *, file_field: str, header_prefix: str, hashing: BodyDigest | None = None
) -> Received:
    """Return a body of one of the types.

    Args:
        request: a request whose body nothing has read yet.
        file_field: the name of the file in a form.
        header_prefix: prefix of headers that are fields: ``x-adapter-name`` is ``name``.
        hashing: takes the tensors while they are received, unless they are in JSON.

    Raises:
        InvalidRequestError: the body has another type, or is not a form.
        ClientDisconnect: the body was cut off.
    """
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    fields = _outer_fields(request, header_prefix)
    form = None
    if kind == FORM_TYPE:
        form = FormReader(content_type, file_field, max_field_bytes=MAX_FIELD_BYTES)
    elif kind not in RAW_TYPES and not is_json(kind):
        raise InvalidRequestError(
            "The content type must be application/octet-stream, application/x-safetensors, "
            "multipart/form-data or application/json."
        )
    body = bytearray()
    began_s = time.perf_counter()
    async for received in request.stream():
        piece = received if form is None else form.feed(received)
        body += piece
        if hashing is not None and not is_json(kind):
            hashing.add(piece)
    if form is not None:
        form.finish()
        fields |= form.fields
    ended_s = time.perf_counter()
    return Received(kind=kind, body=body, fields=fields, began_s=began_s, ended_s=ended_s)


def is_json(kind: str) -> bool:
    """True if a content type is JSON."""
    return kind == "application/json" or kind.endswith("+json")


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return a JSON body.

    Raises:
        InvalidRequestError: it is not JSON, or not an object.
    """
    content = parse_json(body)
    if not is_object(content):
        raise InvalidRequestError("The body must be a JSON object.")
    return content


def from_base64(value: Any, *, param: str) -> bytes:
    """Return the bytes of a field.

    Raises:
        InvalidRequestError: it is not base64.
    """
    problem = "must be a safetensors file in base64"
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except ValueError:
            problem = "is not base64"
    raise InvalidRequestError(f"{param} {problem}.", param=param.partition("[")[0])


def validated(model: type[T], fields: Mapping[str, Any]) -> T:
    """Return the fields of a body that FastAPI does not read.

    Raises:
        InvalidRequestError: a field is wrong.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as problem:
        problems: list[dict[str, Any]] = [
            {**fault, "loc": ("body", *fault["loc"])} for fault in problem.errors()
        ]
        param = param_of(problems[0]["loc"])
        raise InvalidRequestError(describe(problems), param=param) from None


def _outer_fields(request: Request, prefix: str) -> dict[str, str]:
    headers = {
        name.removeprefix(prefix).replace("-", "_"): value
        for name, value in request.headers.items()
        if name.startswith(prefix)
    }
    return headers | dict(request.query_params)
