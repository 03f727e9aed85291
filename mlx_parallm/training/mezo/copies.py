"""Perturbed copies that are served as adapters: what a step of generation or of a caller needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.types.errors import ConflictError, InvalidRequestError, ParallmError
from mlx_parallm.types.training import Segment

#: ``NAME_PREFIX`` begins the names of the copies; other adapters should not be called so.
NAME_PREFIX = "mezo-"


@dataclass(frozen=True, slots=True)
class Copy:
    """A perturbed copy of the parameters of a session.

    Attributes:
        name: of its adapter, ``mezo-<id>-<step>-<direction><sign>``; it ends in ``-0`` without a
            perturbation.
        direction: index of the direction; None: it is not perturbed.
        sign: of the perturbation, 1 or -1.
    """

    name: str
    direction: int | None
    sign: int


class Adapters(Protocol):
    """Serves adapters on all engines; see ``AdapterControl``."""

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> AdapterInfo:
        """Serve an adapter of a model."""
        ...

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Admit no more requests of an adapter; raise NotFoundError."""
        ...


def copies_of(session_id: str, step: int, segments: Sequence[Segment]) -> list[Copy]:
    """Return the copies of the segments of a step, each once, in their order.

    Args:
        session_id: the session.
        step: the number of the step, from 1.
        segments: see ``Estimator.segments``.
    """
    stem = f"{NAME_PREFIX}{session_id.removeprefix('mezo_')}-{step}-"
    copies: dict[str, Copy] = {}
    for segment in segments:
        end = "0" if segment.direction is None else f"{segment.direction}{'+-'[segment.sign < 0]}"
        copies[end] = Copy(f"{stem}{end}", segment.direction, segment.sign)
    return list(copies.values())


class ServedCopies:
    """Serves the perturbed copies of steps, and ends that."""

    def __init__(self, adapters: Adapters | None) -> None:
        """``adapters``: None refuses to serve any."""
        self._adapters = adapters

    async def serve(self, model: str, uploads: Sequence[AdapterUpload]) -> None:
        """Serve copies on all engines, all or none; those that are served already stay.

        Raises:
            ConflictError: there is no room for so many adapters.
        """
        if self._adapters is None:
            raise ConflictError("No adapters are served here, so that nothing can be asked.")
        try:
            for upload in uploads:
                await self._adapters.load_adapter(upload, model=model)
        except BaseException as problem:
            await self.drop([upload.name for upload in uploads])
            if isinstance(problem, InvalidRequestError):
                raise ConflictError(str(problem)) from problem
            raise

    async def drop(self, names: Sequence[str]) -> None:
        """End the serving of copies; those that are not served are ignored."""
        if self._adapters is None:
            return
        for name in names:
            # An engine that was started anew has none of them.
            with contextlib.suppress(ParallmError):
                await self._adapters.unload_adapter(name)
