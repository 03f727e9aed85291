"""The one seam to mlx_lm: attention that recognises a paged pool.

mlx_lm's models call ``scaled_dot_product_attention`` by a name in their own module. That name is
replaced by a ``PagedAttentionSeam``, which asks the forward in progress whether the keys it got are
one of its pools, by identity, and otherwise calls the original. So stock forwards, other models of
the same module and layers outside the pool are untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

FUNCTION = "scaled_dot_product_attention"


class PagedStep(Protocol):
    """A forward in progress over paged pools."""

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attention over the pool that ``keys`` is, or None if it is no pool of this step."""
        ...


class PagedAttentionSeam:
    """Stands for ``scaled_dot_product_attention`` in one module of mlx_lm."""

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
        """As mlx_lm's function; see the module's docstring."""
        if self.step is not None:
            output = self.step.attend(queries, keys, scale=scale, mask=mask, sinks=sinks)
            if output is not None:
                return output
        if sinks is not None:
            options["sinks"] = sinks
        return self.original(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)


class ModelSeams:
    """The seams of every module whose classes a model is made of."""

    def __init__(self, model: nn.Module) -> None:
        names = {type(module).__module__ for module in model.modules()}
        self._seams = [_install(sys.modules[name]) for name in sorted(names) if _has(name)]

    @contextmanager
    def during(self, step: PagedStep) -> Iterator[None]:
        """Let ``step`` see attention calls while the block runs."""
        for seam in self._seams:
            seam.step = step
        try:
            yield
        finally:
            for seam in self._seams:
                seam.step = None


def _has(module_name: str) -> bool:
    return hasattr(sys.modules[module_name], FUNCTION)


def _install(module: Any) -> PagedAttentionSeam:
    current = getattr(module, FUNCTION)
    if isinstance(current, PagedAttentionSeam):
        return current
    seam = PagedAttentionSeam(current)
    setattr(module, FUNCTION, seam)
    return seam
