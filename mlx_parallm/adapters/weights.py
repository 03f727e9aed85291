"""What an adapter is, whatever format it came in."""

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
        kind: which kind of module it changes.
        a: ``[r, in]``; ``[r, vocab]`` of an embedding, ``[experts, r, in]`` of experts.
        b: ``[out, r]``; ``[dims, r]`` of an embedding, ``[experts, out, r]`` of experts.
        scale: of the product, already divided by the rank where the format does that.
        magnitude: ``[out]``, or ``[vocab]`` of an embedding, the norms that the rows of the changed
            weight are given (DoRA, arXiv:2402.09353); None for LoRA.
        changes_head: whether an embedding that is the head too is changed as the head, as mlx-lm
            trains it; PEFT changes what tokens are looked up only.
    """

    kind: Kind
    a: HostTensor
    b: HostTensor
    scale: float
    magnitude: HostTensor | None = None
    changes_head: bool = True

    @property
    def rank(self) -> int:
        """R."""
        return self.b.shape[-1]

    def tensors(self) -> Iterator[HostTensor]:
        """``a``, ``b`` and ``magnitude``, if it has one."""
        yield self.a
        yield self.b
        if self.magnitude is not None:
            yield self.magnitude


@dataclass(frozen=True)
class AdapterWeights:
    """What one adapter changes, by the checkpoint's names.

    Attributes:
        modules: changes of weights, by the path of the module.
        saved: parameters that it has in full, by name: those of PEFT's ``modules_to_save``.
        task_type: PEFT's, which says what a head of those is for; None where it is not known.
    """

    modules: Mapping[str, LowRank]
    saved: Mapping[str, HostTensor] = field(default_factory=dict)
    task_type: str | None = None

    @property
    def rank(self) -> int:
        """The largest."""
        return max(one.rank for one in self.modules.values())

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        changes = sum(one.nbytes for module in self.modules.values() for one in module.tensors())
        return changes + sum(one.nbytes for one in self.saved.values())

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides what the adapter does: its identity, in hex."""
        parts = on_threads(_module_digest, sorted(self.modules.items()))
        if self.saved:
            parts += on_threads(_saved_digest, sorted(self.saved.items()))
            parts.append(str(self.task_type).encode())
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _module_digest(module: tuple[str, LowRank]) -> bytes:
    path, one = module
    return _digest((path, one.kind, repr(one.scale), str(one.changes_head)), one.tensors())


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
