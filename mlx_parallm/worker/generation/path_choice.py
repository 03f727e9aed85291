"""Chooses how a model's forward runs: the first path that gives what the stock model gives."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.attention.base import AttentionBackend, CompilableAttention
from mlx_parallm.worker.generation.cache_layout import (
    CacheLayout,
    KVLayout,
    OpaqueLayout,
    StateLayout,
    leaves,
)
from mlx_parallm.worker.generation.discovery import CacheUsers, find_cache_users
from mlx_parallm.worker.generation.group_cache import CacheViews
from mlx_parallm.worker.generation.kv_pools import KVPools
from mlx_parallm.worker.generation.paths.alone import AlonePath
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.paths.packed import PackedPath
from mlx_parallm.worker.generation.paths.sequential import SequentialPath
from mlx_parallm.worker.generation.paths.split import SplitPath
from mlx_parallm.worker.generation.row_selection import RowSelector, install_row_selection
from mlx_parallm.worker.generation.self_check import (
    CheckedText,
    blocks_needed,
    check_path,
    largest_difference,
    random_texts,
    rehearse,
    stock_texts,
)
from mlx_parallm.worker.model_errors import MODEL_ERRORS

logger = logging.getLogger(__name__)

# Longer windows are not tried: the time at load grows with the square of the length.
MAX_CHECKED_SLIDE = 512
#: ``ALONE``: the name of the choice of ``AlonePath``.
ALONE = "alone"


@dataclass(frozen=True, slots=True)
class PathAttempt:
    """What came of trying a path: ``difference`` from the stock model, or the error met.

    ``difference`` is the largest absolute one of a log-probability.
    """

    path: str
    difference: float | None
    error: str | None
    exact: bool


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The path chosen, the name of that choice, and every path tried on the way."""

    path: ForwardPath
    name: str
    attempts: tuple[PathAttempt, ...] = ()


def choose_path(
    model: Any,
    layouts: tuple[CacheLayout, ...],
    backend: AttentionBackend,
    *,
    vocab_size: int,
    num_blocks: int,
    block_size: int,
    dtype: str,
    chosen: str | None = None,
) -> PathChoice:
    """Try paths from the fastest to the safest.

    Each is checked against the stock model on random ragged prompts; ``AlonePath``, which is the
    stock model, is taken when none agrees. With quantised KV no path agrees with the stock model,
    so it is the same path with exact KV that is checked. ``chosen``, the name of an earlier choice
    on an equal device, is taken without a check; it then computes as the checked one does.

    Raises:
        ConfigError: KV cannot be quantised in this model.
    """
    if chosen == ALONE or any(isinstance(one, OpaqueLayout) for one in leaves(layouts)):
        return PathChoice(_alone(model, backend), ALONE)
    attempts: list[PathAttempt] = []
    window = checked_length(model, layouts)
    needed = blocks_needed(block_size, window)
    blocks = max(num_blocks, needed)
    candidates = _Candidates(model, layouts, vocab_size, block_size)
    candidates.use(backend.unquantised(), blocks if backend.quantisation is None else needed)
    if chosen is not None:
        make = dict(candidates.in_order())[chosen]
        if backend.quantisation is not None:
            candidates.use(backend, blocks)
        path = make()
        rehearse(path, random_texts(vocab_size, window), block_size)
        return PathChoice(path, chosen)
    texts = stock_texts(model, vocab_size, window)
    for name, make in candidates.in_order():
        path = make()
        difference, error, exact = check_path(path, texts, block_size, dtype)
        attempts.append(PathAttempt(name, difference, error, exact))
        logger.info("path %s: difference %s, error %s", name, difference, error)
        if exact and backend.quantisation is None:
            return PathChoice(path, name, tuple(attempts))
        if isinstance(path, SplitPath):
            path.close()
        if exact:
            candidates.use(backend, blocks)
            return PathChoice(_that_runs(make(), texts, block_size), name, tuple(attempts))
    return PathChoice(_alone(model, backend), ALONE, tuple(attempts))


def _alone(model: Any, backend: AttentionBackend) -> AlonePath:
    if backend.quantisation is not None:
        raise ConfigError(
            "kv_cache_dtype must be auto: this model runs with caches of its own only, which are "
            "not quantised."
        )
    return AlonePath(model)


def _that_runs(path: ForwardPath, texts: Sequence[CheckedText], block_size: int) -> ForwardPath:
    """The path, if it runs with quantised KV; how far it is from exact KV is not judged here."""
    try:
        difference = largest_difference(path, texts, block_size)
    except MODEL_ERRORS as cause:
        raise ConfigError(f"kv_cache_dtype must be auto for this model: {cause}") from cause
    if not math.isfinite(difference):
        raise ConfigError(
            "kv_cache_dtype must be auto for this model: its keys or values are too large for the "
            "scales of quantised ones."
        )
    logger.info("quantised KV moves log-probabilities of random text by up to %s", difference)
    return path


def checked_length(model: Any, layouts: tuple[CacheLayout, ...]) -> int | None:
    """A length beyond which a model attends to a part of its past only; None if it never does.

    Sliding windows that are too long to try are known to be right; which keys a sparse attention
    selects is not, so its limit comes first.
    """
    selected = max((_num_selected(module) for module in model.modules()), default=0)
    window = largest_window(layouts)
    if selected or window is None or window > MAX_CHECKED_SLIDE:
        return selected or None
    return window


def _num_selected(module: Any) -> int:
    """How many keys an attention module selects, by mlx_lm's names for it; 0 for all."""
    tokens = getattr(module, "index_topk", None)
    blocks, size = (
        getattr(module, name, None) for name in ("index_topk_blocks", "index_block_size")
    )
    if isinstance(blocks, int) and isinstance(size, int):
        return blocks * size
    return tokens if isinstance(tokens, int) else 0


def largest_window(layouts: tuple[CacheLayout, ...]) -> int | None:
    """The longest sliding window of any layer."""
    windows = [one.window for one in leaves(layouts) if isinstance(one, KVLayout)]
    return max((window for window in windows if window is not None), default=None)


class _Candidates:
    """The paths that could suit a model."""

    def __init__(
        self,
        model: Any,
        layouts: tuple[CacheLayout, ...],
        vocab_size: int,
        block_size: int,
    ) -> None:
        self._model = model
        self._layouts = layouts
        self._block_size = block_size
        self._selector: RowSelector = install_row_selection(model, vocab_size)

    def use(self, backend: AttentionBackend, num_blocks: int) -> None:
        """Make paths over new pools of this backend from now on."""
        shapes = [one.shape for one in leaves(self._layouts) if isinstance(one, KVLayout)]
        self._backend = backend
        self._pools = KVPools(backend, shapes, num_blocks)

    def in_order(self) -> Iterator[tuple[str, Callable[[], ForwardPath]]]:
        if self._layouts and all(isinstance(one, KVLayout) for one in self._layouts):
            if isinstance(self._backend, CompilableAttention):
                yield "packed (compiled)", lambda: self._packed(compiles=True)
            yield "packed", lambda: self._packed(compiles=False)
        users = find_cache_users(self._model)
        if not any(module is self._model for module in users.modules):
            yield from self._splits(users)
        yield "sequential", self._sequential

    def _splits(self, users: CacheUsers) -> Iterator[tuple[str, Callable[[], ForwardPath]]]:
        has_kv = any(isinstance(one, KVLayout) for one in leaves(self._layouts))
        has_state = any(isinstance(one, StateLayout) for one in leaves(self._layouts))
        compiles = isinstance(self._backend, CompilableAttention)
        if has_kv and has_state:
            if compiles:
                yield (
                    "split (state, compiled)",
                    lambda: self._split(users.stateful, compiles=True),
                )
            yield "split (state)", lambda: self._split(users.stateful)
        if compiles:
            yield (
                "split (compiled)",
                lambda: self._split(users.modules, compiles=True),
            )
        yield "split", lambda: self._split(users.modules)
        yield "split (rows)", lambda: self._split(users.modules, batch_decode=False)

    def _packed(self, *, compiles: bool) -> ForwardPath:
        return PackedPath(
            self._model,
            self._layouts,
            self._pools,
            self._backend,
            self._selector,
            compiles=compiles,
        )

    def _split(
        self,
        modules: list[Any],
        *,
        batch_decode: bool = True,
        compiles: bool = False,
    ) -> ForwardPath:
        return SplitPath(
            self._model,
            self._views(),
            self._pools,
            self._backend,
            self._selector,
            modules,
            self._block_size,
            batch_decode=batch_decode,
            compiles=compiles,
        )

    def _sequential(self) -> ForwardPath:
        return SequentialPath(
            self._model, self._views(), self._pools, self._backend, self._block_size
        )

    def _views(self) -> CacheViews:
        return CacheViews(self._layouts, self._pools, self._backend)
