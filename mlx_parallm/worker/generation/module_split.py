"""Runs chosen modules of a model group by group inside a packed forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.worker.generation.group_cache import CacheViews, has_state_cache, is_packed_cache
from mlx_parallm.worker.generation.paged_cache import WindowMask
from mlx_parallm.worker.generation.row_groups import Group, join_outputs
from mlx_parallm.worker.generation.state_store import GroupStateCache, KeptStates, States
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.lora.context import AdapterContext


class ModuleSplit:
    """Splits the calls of some modules into one call per group, while a step is in progress."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._step: SplitStep | ProposalStep | None = None
        self._calls = WrappedCalls(modules, self._splitting)

    @contextmanager
    def during(self, step: SplitStep | ProposalStep) -> Iterator[None]:
        """Split the modules' calls by the groups of ``step`` in the context."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def remove(self) -> None:
        """Stop wrapping the modules' calls, for good."""
        self._calls.remove()

    def _splitting(self, original: Any) -> Methods:
        def call(module: Any, *args: Any, **options: Any) -> Any:
            run = partial(original.__call__, module)
            if self._step is None:
                return run(*args, **options)
            return self._step.run(run, args, options)

        return {"__call__": call}


class SplitStep:
    """The groups of one step, with the states of each group, which modules replace."""

    def __init__(
        self,
        views: CacheViews,
        groups: Sequence[Group],
        states: Sequence[States],
        kept: Sequence[KeptStates],
        positions: mx.array,
        adapters: AdapterContext,
    ) -> None:
        self._adapters = adapters
        self._views = views
        self._groups = groups
        self._states = states
        self._kept = kept
        self._positions = positions
        self._num_rows = positions.shape[0]

    def run(self, call: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call a module once per group, and return its outputs as packed rows."""
        outputs = []
        for group, states, kept in zip(self._groups, self._states, self._kept, strict=True):
            state_caches: dict[int, GroupStateCache] = {}
            convert = partial(self._convert, group=group, states=states, state_caches=state_caches)
            values = [convert(value) for value in (*args, *options.values())]
            if group.continues:
                values = _after(outputs[-1], values)
            own_args = values[: len(args)]
            own_options = dict(zip(options, values[len(args) :], strict=True))
            noting = kept.noting(state_caches, group.length)
            with self._adapters.during(group.adapter_rows), noting:
                outputs.append(call(*own_args, **own_options))
            for cache in state_caches.values():
                cache.commit()
        return join_outputs(self._groups, outputs)

    def _convert(
        self, value: Any, *, group: Group, states: States, state_caches: dict[int, GroupStateCache]
    ) -> Any:
        """Return a group's part or view of an argument; other values are returned as they are."""
        if value is self._positions:
            return group.offset
        if isinstance(value, mx.array):
            return group.take(value, self._num_rows)
        if isinstance(value, WindowMask):
            return group.mask(value.window, as_array=value.as_array)
        if is_packed_cache(value):
            return self._views.grouped(value, group, states, state_caches)
        if isinstance(value, list | tuple):
            parts = (
                self._convert(part, group=group, states=states, state_caches=state_caches)
                for part in value
            )
            return type(value)(parts)
        return value


class ProposalStep:
    """A step of which modules with states see other groups than modules with keys."""

    def __init__(self, attending: SplitStep, stateful: SplitStep) -> None:
        self._attending = attending
        self._stateful = stateful

    def run(self, call: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """See ``SplitStep.run``."""
        has_state = any(has_state_cache(value) for value in (*args, *options.values()))
        step = self._stateful if has_state else self._attending
        return step.run(call, args, options)


def _after(output: Any, values: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call whose arrays are computed after another call's output.

    Otherwise MLX would compute the scores of all parts of a chunk first, since no part needs the
    attention of another one.
    """
    arrays = [value for value in values if isinstance(value, mx.array)]
    before = [value for _, value in tree_flatten(output) if isinstance(value, mx.array)]
    if not (arrays and before):
        return list(values)
    later = iter(mx.depends(arrays, before))
    return [next(later) if isinstance(value, mx.array) else value for value in values]
