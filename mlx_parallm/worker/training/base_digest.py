"""The identity of the weights that a training session starts from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import mlx.core as mx
import numpy as np

#: ``PART_BYTES``: what is hashed in one stage, so that streams do not wait for a whole model.
PART_BYTES = 8 << 20


class BaseDigest:
    """The SHA-256 of a model's parameters, computed in stages.

    It covers the name, dtype, shape and bytes of each parameter, in the order of their names.
    """

    def __init__(self, parameters: Mapping[str, mx.array]) -> None:
        self._digest = hashlib.sha256()
        self._parts = _parts(parameters)
        self._next = next(self._parts, None)

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to hash."""
        return self._next is None

    def advance(self) -> None:
        """Hash the next part, of at most ``PART_BYTES`` or a single row of a parameter."""
        assert self._next is not None, "a part is left"
        self._digest.update(self._next)
        self._next = next(self._parts, None)

    def value(self) -> str:
        """Hash what is left; return the digest in hex."""
        while not self.is_complete:
            self.advance()
        return self._digest.hexdigest()


def _parts(parameters: Mapping[str, mx.array]) -> Iterator[bytes]:
    for name, array in sorted(parameters.items()):
        yield f"{name} {array.dtype} {array.shape}\0".encode()
        rows = array if array.ndim else array[None]
        row_bytes = max(1, rows.nbytes // max(1, rows.shape[0]))
        step = max(1, PART_BYTES // row_bytes)
        for begin in range(0, rows.shape[0], step):
            part = mx.contiguous(rows[begin : begin + step])
            yield np.array(mx.view(part.reshape(-1), mx.uint8)).tobytes()
