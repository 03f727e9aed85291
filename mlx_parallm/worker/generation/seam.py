"""The one seam to mlx_lm: functions and methods that a packed forward replaces.

mlx_lm's models call ``scaled_dot_product_attention`` and ``swiglu`` by names in their own module.
These names are replaced by objects that know the forward in progress. Without a forward they call
the original, so stock forwards, other models of the same module and layers outside the pool are
unchanged.

- Attention asks the forward whether the keys, by identity, are one of its pools. If not, it calls
  the original.
- SwiGLU takes the faster of two ways to the same values.
- The gated delta rule and state spaces take kernels where these exist (``state_layers.py``), and
  note what states are computed from for rows with proposals (``kept_states.py``).
- Classes that compute attention themselves have their ``__call__`` replaced
  (``attention_overrides.py``), and so have gated delta nets, which have kernels (``delta_net.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, ssm

from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.numerics.elementary import is_exp_slow, silu
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.generation.attention_overrides import ATTENTION_OVERRIDES, Override
from mlx_parallm.worker.layers.delta_net import NETS, delta_net
from mlx_parallm.worker.layers.kept_states import RECURRENCES, RecurrenceSeam, StateNotes
from mlx_parallm.worker.layers.state_kernels import DeltaKernel, ScanKernel
from mlx_parallm.worker.layers.state_layers import DeltaSeam, ScanSeam

# MIN_SWIGLU_SIZE: for fewer elements, one compiled operation is as fast as a dozen vectorised ones.
MIN_SWIGLU_SIZE = 8192


class PagedStep(Protocol):
    """A forward in progress over paged pools.

    Attributes:
        notes: where recurrent layers note what their states are computed from; None if nowhere.
    """

    notes: StateNotes | None = None

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        soft_cap: float | None = None,
    ) -> mx.array | None:
        """Return the attention over the pool that ``keys`` is; None if it is no pool of this step.

        The other arguments are those of ``AttentionBackend.attend``.
        """
        ...


class PagedAttentionSeam:
    """Replaces ``scaled_dot_product_attention`` in one module of mlx_lm."""

    def __init__(self, original: Callable[..., mx.array]) -> None:
        self.original = original
        self.step: PagedStep | None = None

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        """Return what mlx_lm's function returns."""
        if self.step is not None:
            output = self.step.attend(queries, keys, scale=scale, mask=mask, sinks=sinks)
            if output is not None:
                return output
        if sinks is not None:
            options["sinks"] = sinks
        return self.original(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)


class SwigluSeam:
    """Replaces ``swiglu`` in one module of mlx_lm, on devices where MLX's ``exp`` is slow."""

    def __init__(self, original: Callable[..., mx.array]) -> None:
        self.original = original
        self.step: PagedStep | None = None

    def __call__(self, gate: mx.array, x: mx.array) -> mx.array:
        """Return ``silu(gate) * x``."""
        is_fast = gate.size >= MIN_SWIGLU_SIZE and gate.dtype == mx.float32
        if self.step is None or not is_fast:
            return self.original(gate, x)
        return silu(gate) * x


class ModuleSeam:
    """Replaces ``__call__`` of a class of mlx_lm by an override, where that applies."""

    def __init__(self, override: Override, original: Callable[..., Any]) -> None:
        self.original = original
        self.override = override
        self.step: PagedStep | None = None

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        """Bind the seam to an instance, as Python binds a function that is called as a method."""
        return self if module is None else MethodType(self, module)

    def __call__(self, module: nn.Module, *args: Any, **options: Any) -> Any:
        """Return the module's output."""
        if self.step is not None:
            output = self.override(self.step, module, *args, **options)
            if output is not None:
                return output
        return self.original(module, *args, **options)


Seam = PagedAttentionSeam | SwigluSeam | ModuleSeam | DeltaSeam | ScanSeam | RecurrenceSeam


class ModelSeams:
    """The seams in all Python modules that define a model's classes."""

    def __init__(self, model: nn.Module) -> None:
        kinds: dict[str, Callable[[Callable[..., Any]], Seam]] = {
            "scaled_dot_product_attention": PagedAttentionSeam
        }
        for function, recurrence in RECURRENCES.items():
            kinds[function] = partial(RecurrenceSeam, recurrence=recurrence)
        if is_exp_slow():
            kinds["swiglu"] = SwigluSeam
        names = {type(module).__module__ for module in model.modules()}
        self._seams: list[Seam] = [
            _install(sys.modules[name], function, kind)
            for name in sorted(names)
            for function, kind in kinds.items()
            if hasattr(sys.modules[name], function)
        ]
        self._seams += [
            _install(getattr(sys.modules[name], kind), "__call__", partial(ModuleSeam, override))
            for (name, kind), override in ATTENTION_OVERRIDES.items()
            if name in names
        ]
        self._seams += [
            _install(getattr(sys.modules[name], kind), "__call__", partial(ModuleSeam, delta_net))
            for name, kind in NETS
            if name in names
        ]
        if backend_name() == "cuda":
            self._seams += _state_seams(names)

    @contextmanager
    def during(self, step: PagedStep) -> Iterator[None]:
        """Pass calls to ``step`` in the context."""
        for seam in self._seams:
            seam.step = step
        try:
            yield
        finally:
            for seam in self._seams:
                seam.step = None


def _state_seams(names: Iterable[str]) -> list[Seam]:
    """Return the seams of recurrent layers that modules of these names use.

    They are for CUDA, because mlx_lm has kernels for these layers on Metal only.
    """
    seams: list[Seam] = []
    if any(hasattr(sys.modules[name], "gated_delta_update") for name in names):
        make = partial(DeltaSeam, kernel=DeltaKernel(CudaLanguage()))
        seams.append(_install(gated_delta, "gated_delta_ops", make))
    if any(hasattr(sys.modules[name], "ssm_update") for name in names):
        make = partial(ScanSeam, kernel=ScanKernel(CudaLanguage()))
        seams.append(_install(ssm, "ssm_attn", make))
    return seams


def _install(owner: Any, name: str, make: Callable[[Any], Seam]) -> Seam:
    """Replace an attribute by a seam, and return that; an earlier model's seam is shared."""
    current = getattr(owner, name)
    if isinstance(current, Seam):
        return current
    seam = make(current)
    setattr(owner, name, seam)
    return seam
