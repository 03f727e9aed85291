"""The contents of an adapter, independent of its file format."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlx_parallm.adapters.tensors import HostTensor, on_threads

Kind = Literal["linear", "embedding", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The change to one module's weight: ``scale * b @ a`` (LoRA, arXiv:2106.09685).

    Attributes:
        kind: the kind of module that it changes.
        a: ``[r, in]``; for an embedding ``[r, vocab]``, for experts ``[experts, r, in]``.
        b: ``[out, r]``; for an embedding ``[dims, r]``, for experts ``[experts, out, r]``.
        scale: the factor of the product; formats that divide by the rank have done so.
        magnitude: the norms of the changed weight's rows, ``[out]``, or ``[vocab]`` for an
            embedding (DoRA, arXiv:2402.09353); None for LoRA.
        changes_head: with tied embeddings, True: it changes embedding and head (mlx-lm); False: it
            changes only the embedding (PEFT).
    """

    kind: Kind
    a: HostTensor
    b: HostTensor
    scale: float
    magnitude: HostTensor | None = None
    changes_head: bool = True

    @property
    def rank(self) -> int:
        """The rank, ``r``."""
        return self.b.shape[-1]

    def tensors(self) -> Iterator[HostTensor]:
        """Yield ``a``, ``b`` and, for DoRA, ``magnitude``."""
        yield self.a
        yield self.b
        if self.magnitude is not None:
            yield self.magnitude


@dataclass(frozen=True)
class AdapterWeights:
    """The changes of an adapter, under the checkpoint's names.

    Attributes:
        modules: changes of weights, by the path of the module.
        saved: parameters saved in full (PEFT's ``modules_to_save``), by name.
        task_type: PEFT's field, which gives the purpose of a saved head; None if unknown.
    """

    modules: Mapping[str, LowRank]
    saved: Mapping[str, HostTensor] = field(default_factory=dict)
    task_type: str | None = None

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules.values())

    @property
    def num_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        tensors = [tensor for module in self.modules.values() for tensor in module.tensors()]
        return sum(tensor.nbytes for tensor in (*tensors, *self.saved.values()))

    @functools.cached_property
    def digest(self) -> str:
        """The adapter's identity: the SHA-256, in hex, of all that decides its effect."""
        parts = on_threads(_module_digest, sorted(self.modules.items()))
        if self.saved:
            parts += on_threads(_saved_digest, sorted(self.saved.items()))
            parts.append(str(self.task_type).encode())
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _module_digest(item: tuple[str, LowRank]) -> bytes:
    path, module = item
    settings = (path, module.kind, repr(module.scale), str(module.changes_head))
    return _digest(settings, module.tensors())


def _saved_digest(saved: tuple[str, HostTensor]) -> bytes:
    name, tensor = saved
    return _digest((name, "saved"), [tensor])


def _digest(settings: Iterable[str], tensors: Iterable[HostTensor]) -> bytes:
    total = hashlib.sha256()
    total.update("\0".join((*settings, "")).encode())
    for tensor in tensors:
        raw, order = tensor.stored()
        total.update(f"{tensor.shape}{tensor.dtype}{order}\0".encode())
        total.update(raw)
    return total.digest()
