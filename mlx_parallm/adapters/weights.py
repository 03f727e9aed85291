"""The contents of an adapter, independent of its file format."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlx_parallm.adapters.tensors import HostTensor, on_threads
from mlx_parallm.types.content import adapter_content, tensors_digest

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
        copies: weights of the model, by the path of the module, that the file repeats unchanged:
            PEFT writes the tables that it changes.
        of_checkpoint: True if the changes are of the checkpoint's weights, as transformers holds
            them (PEFT); False if of the weights as the model holds them here (mlx-lm, sessions).
        is_transposed: True if transformers keeps the changed weights transposed, as GPT-2's; it
            concerns only what is written.
    """

    modules: Mapping[str, LowRank]
    saved: Mapping[str, HostTensor] = field(default_factory=dict[str, HostTensor])
    task_type: str | None = None
    copies: Mapping[str, HostTensor] = field(default_factory=dict[str, HostTensor])
    of_checkpoint: bool = False
    is_transposed: bool = False

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules.values())

    @property
    def num_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        tensors = [tensor for module in self.modules.values() for tensor in module.tensors()]
        others = (*self.saved.values(), *self.copies.values())
        return sum(tensor.nbytes for tensor in (*tensors, *others))

    @functools.cached_property
    def digest(self) -> str:
        """The adapter's identity: the SHA-256, in hex, of all that decides its effect."""
        parts = on_threads(_module_digest, sorted(self.modules.items()))
        if self.saved:
            parts += on_threads(_saved_digest, sorted(self.saved.items()))
            parts.append(str(self.task_type).encode())
        parts += on_threads(_copy_digest, sorted(self.copies.items()))
        if self.of_checkpoint:
            parts.append(b"of the checkpoint")
        return adapter_content(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankLayout:
    """A ``LowRank`` without its tensors."""

    kind: Kind
    scale: float
    has_magnitude: bool
    changes_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayout:
    """An adapter without its tensors.

    Attributes:
        modules: by path.
        saved: names of the parameters saved in full.
        task_type: as in ``AdapterWeights``.
        copies: paths of the modules whose weights it repeats.
        of_checkpoint: as in ``AdapterWeights``.
        is_transposed: as in ``AdapterWeights``.
    """

    modules: Mapping[str, LowRankLayout]
    saved: tuple[str, ...] = ()
    task_type: str | None = None
    copies: tuple[str, ...] = ()
    of_checkpoint: bool = False
    is_transposed: bool = False


def split_adapter(adapter: AdapterWeights) -> tuple[AdapterLayout, dict[str, HostTensor]]:
    """Return an adapter's layout, and its tensors by the names that ``join_adapter`` expects."""
    modules: dict[str, LowRankLayout] = {}
    tensors = {f"saved {name}": tensor for name, tensor in adapter.saved.items()}
    tensors |= {f"copy {path}": tensor for path, tensor in adapter.copies.items()}
    for path, module in adapter.modules.items():
        modules[path] = LowRankLayout(
            kind=module.kind,
            scale=module.scale,
            has_magnitude=module.magnitude is not None,
            changes_head=module.changes_head,
        )
        tensors |= {f"a {path}": module.a, f"b {path}": module.b}
        if module.magnitude is not None:
            tensors[f"magnitude {path}"] = module.magnitude
    layout = AdapterLayout(
        modules=modules,
        saved=tuple(adapter.saved),
        task_type=adapter.task_type,
        copies=tuple(adapter.copies),
        of_checkpoint=adapter.of_checkpoint,
        is_transposed=adapter.is_transposed,
    )
    return layout, tensors


def join_adapter(layout: AdapterLayout, tensors: Mapping[str, HostTensor]) -> AdapterWeights:
    """Return the adapter of a layout and its tensors."""
    modules = {
        path: LowRank(
            kind=module.kind,
            a=tensors[f"a {path}"],
            b=tensors[f"b {path}"],
            scale=module.scale,
            magnitude=tensors[f"magnitude {path}"] if module.has_magnitude else None,
            changes_head=module.changes_head,
        )
        for path, module in layout.modules.items()
    }
    saved = {name: tensors[f"saved {name}"] for name in layout.saved}
    copies = {path: tensors[f"copy {path}"] for path in layout.copies}
    return AdapterWeights(
        modules, saved, layout.task_type, copies, layout.of_checkpoint, layout.is_transposed
    )


def _module_digest(item: tuple[str, LowRank]) -> bytes:
    path, module = item
    settings = (path, module.kind, repr(module.scale), str(module.changes_head))
    return _digest(settings, module.tensors())


def _saved_digest(saved: tuple[str, HostTensor]) -> bytes:
    name, tensor = saved
    return _digest((name, "saved"), [tensor])


def _copy_digest(copy: tuple[str, HostTensor]) -> bytes:
    path, tensor = copy
    return _digest((path, "copy"), [tensor])


def _digest(settings: Iterable[str], tensors: Iterable[HostTensor]) -> bytes:
    return tensors_digest(settings, map(_with_header, tensors))


def _with_header(tensor: HostTensor) -> tuple[str, memoryview]:
    numbers, order = tensor.stored()
    return f"{tensor.shape}{tensor.dtype}{order}", numbers
