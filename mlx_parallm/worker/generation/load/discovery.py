"""Finds the modules that read or write caches, by tracing stock forwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls

# USES are the attributes whose access counts as a use of a cache. Positions and masks are not
# among them, because packed caches provide these.
USES = frozenset({"update_and_fetch", "keys_and_values", "keys", "values", "state", "cache"})
PROBE_TOKENS = 3


@dataclass(slots=True)
class CacheUsers:
    """The outermost modules that use caches; no module here is part of another.

    Attributes:
        modules: all modules that use a cache.
        stateful: those that use a state besides keys and values.
    """

    modules: list[nn.Module] = field(default_factory=list)
    stateful: list[nn.Module] = field(default_factory=list)


def find_cache_users(model: Any) -> CacheUsers:
    """Run a prompt and a decode step with stock caches; return the modules that use them."""
    trace = _Trace()
    caches = make_prompt_cache(model)
    traced = [module for module in model.modules() if not _is_plain(module)]
    for cache in caches:
        _trace_cache(cache, trace)
    with WrappedCalls(traced, partial(_tracing_module, trace=trace)):
        for tokens in ([0] * PROBE_TOKENS, [0]):
            mx.eval(model(mx.array([tokens]), cache=caches))
    return _outermost(trace)


class _Trace:
    """The modules whose calls are in progress, and those that have used a cache."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.users: dict[int, nn.Module] = {}
        self.stateful: set[int] = set()

    def note(self, *, is_state: bool) -> None:
        """Record that the innermost module uses a cache; ``is_state`` if it is not KV."""
        if not self.stack:
            return
        module = self.stack[-1]
        self.users[id(module)] = module
        if is_state:
            self.stateful.add(id(module))


def _is_plain(module: nn.Module) -> bool:
    """True if a module cannot use a cache: it is one of MLX's own layers, or only a container."""
    return type(module).__module__.startswith("mlx.nn") or not callable(module)


def _tracing_module(original: Any, *, trace: _Trace) -> Methods:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        trace.stack.append(self)
        try:
            return original.__call__(self, *args, **options)
        finally:
            trace.stack.pop()

    return {"__call__": call}


def _trace_cache(cache: Any, trace: _Trace) -> None:
    if isinstance(cache, CacheList):
        for part in cache.caches:
            _trace_cache(part, trace)
        return
    WrappedCalls([cache], partial(_tracing_cache, trace=trace))


def _tracing_cache(original: Any, *, trace: _Trace) -> Methods:
    is_state = issubclass(original, ArraysCache)

    def get_attribute(self: Any, name: str) -> Any:
        if name in USES:
            trace.note(is_state=is_state)
        return original.__getattribute__(self, name)

    return {"__getattribute__": get_attribute}


def _outermost(trace: _Trace) -> CacheUsers:
    inner: dict[int, list[int]] = {}
    for key, module in trace.users.items():
        inner[key] = [id(part) for part in module.modules() if id(part) != key]
    nested = {part for parts in inner.values() for part in parts}
    users = CacheUsers()
    for key, module in trace.users.items():
        if key in nested:
            continue
        users.modules.append(module)
        if key in trace.stateful or any(part in trace.stateful for part in inner[key]):
            users.stateful.append(module)
    return users
