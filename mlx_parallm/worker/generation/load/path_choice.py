"""Chooses how a model's forward runs: by the fastest path that agrees with the stock model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.worker.attention.base import AttentionBackend, CompilableAttention
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.ranks import Ranks, agreed
from mlx_parallm.worker.generation.cache_layout import (
    CacheLayout,
    KVLayout,
    OpaqueLayout,
    StateLayout,
    leaves,
)
from mlx_parallm.worker.generation.group_cache import CacheViews
from mlx_parallm.worker.generation.load.checked_sources import CheckedSources, checked_sources
from mlx_parallm.worker.generation.load.discovery import CacheUsers, find_cache_users
from mlx_parallm.worker.generation.load.image_check import ImageCheck
from mlx_parallm.worker.generation.load.self_check import (
    CheckedText,
    blocks_needed,
    check_path,
    largest_difference,
    random_texts,
    rehearsed,
    stock_texts,
)
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.generation.paths.alone import AlonePath
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.paths.packed import PackedPath
from mlx_parallm.worker.generation.paths.sequential import SequentialPath
from mlx_parallm.worker.generation.paths.split import SplitPath
from mlx_parallm.worker.generation.row_selection import RowSelector, row_selection

logger = logging.getLogger(__name__)

# MAX_CHECKED_SLIDE: longer windows are not tried, as the time at load grows with their square.
MAX_CHECKED_SLIDE = 512
#: ALONE is the name of the choice of ``AlonePath``.
ALONE = "alone"


@dataclass(frozen=True, slots=True)
class PathAttempt:
    """The result of trying a path.

    Attributes:
        path: the name of the choice.
        difference: the largest absolute difference of a log-probability from the stock model's, in
            the units of ``CheckedText``; None if there was an error.
        error: the error; None if there was none.
        agrees: True if the difference is within rounding.
    """

    path: str
    difference: float | None
    error: str | None
    agrees: bool


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The chosen path, and what is known about it.

    Attributes:
        path: the path.
        name: of the choice.
        attempts: all paths that were tried.
        selector: of the head's rows; inactive if none was installed.
        why_no_images: why the path cannot compute rows of images; None if it can, or if that
            was not checked.
    """

    path: ForwardPath
    name: str
    attempts: tuple[PathAttempt, ...] = ()
    selector: RowSelector = field(default_factory=RowSelector)
    why_no_images: str | None = None


def choose_path(  # noqa: PLR0913 - settings, by name
    model: Any,
    layouts: tuple[CacheLayout, ...],
    backend: AttentionBackend,
    *,
    vocab_size: int,
    num_blocks: int,
    block_size: int,
    dtype: str,
    chosen: str | None = None,
    head: int | None = None,
    ranks: Ranks | None = None,
    make_check: Callable[[], ImageCheck] | None = None,
    max_scores: float = math.inf,
) -> Generator[None, None, PathChoice]:
    """Return the first path that agrees with the stock model, from the fastest to the safest.

    Each path is checked on random ragged prompts, in stages (see ``ops.Stages``). If none agrees,
    ``AlonePath`` is taken, which is the stock model. With quantised KV no path agrees, so the same
    path with exact KV is checked. Encoder-decoders run packed or not at all.

    Args:
        model: the model.
        layouts: the layouts of its caches.
        backend: the attention backend.
        vocab_size: the number of rows of its embedding table.
        num_blocks: the number of KV blocks in the pool.
        block_size: the tokens of a block.
        dtype: the model's dtype, which decides the tolerance.
        chosen: the name of an earlier choice on an equal device. That path is taken without a
            check, and computes exactly as the checked path does: one that is compiled runs the
            check's steps, others run none. None to choose.
        head: the number of the head that was chosen then; None to look for it.
        ranks: the processes that compute the model together and must choose alike; None if there is
            this one alone.
        make_check: returns the check of rows of images in the chosen path; None if the model has
            no tower. It is not called for an earlier choice.
        max_scores: most scores of a head that a module of the model computes at once for a prompt.

    Raises:
        ConfigError: KV cannot be quantised in this model.
        ModelLoadError: the packed path of an encoder-decoder disagrees with the stock model.
    """
    images = None if make_check is None or chosen is not None else make_check()

    def why_not(path: ForwardPath) -> Generator[None, None, str | None]:
        return None if images is None else (yield from images.why_not(path, block_size, dtype))

    if chosen == ALONE or any(isinstance(layout, OpaqueLayout) for layout in leaves(layouts)):
        path = _alone(model, backend)
        return PathChoice(path, ALONE, why_no_images=(yield from why_not(path)))
    attempts: list[PathAttempt] = []
    window = checked_length(model, layouts)
    needed = blocks_needed(block_size, window)
    sources = checked_sources(model, vocab_size, block_size, first_block=needed)
    needed += 0 if sources is None else sources.num_blocks
    blocks = max(num_blocks, needed)
    selector = yield from row_selection(model, vocab_size, ranks, head)
    candidates = _Candidates(model, layouts, block_size, max_scores, selector)
    exact = blocks if backend.quantisation is None else needed
    yield from candidates.use(backend.unquantised(), exact)
    if chosen is not None:
        make = candidates.named(chosen)
        if backend.quantisation is not None:
            yield from candidates.use(backend, blocks)
        path = yield from rehearsed(make(), random_texts(vocab_size, window), block_size, sources)
        return PathChoice(path, chosen, selector=selector)
    texts = yield from stock_texts(model, vocab_size, window, sources, dtype)
    for name, make in candidates.in_order():
        path = make()
        checking = check_path(path, texts, block_size, dtype, sources)
        attempt = yield from _attempt(name, checking, ranks)
        attempts.append(attempt)
        reason = (yield from why_not(path)) if attempt.agrees else None
        if attempt.agrees and backend.quantisation is None:
            return PathChoice(path, name, tuple(attempts), selector, reason)
        if isinstance(path, SplitPath):
            path.close()
        if attempt.agrees:
            yield from candidates.use(backend, blocks)
            path = yield from _runnable(make(), texts, block_size, sources)
            return PathChoice(path, name, tuple(attempts), selector, reason)
    path = _alone(model, backend, attempts)
    tried = tuple(attempts)
    return PathChoice(path, ALONE, tried, selector, (yield from why_not(path)))


def _attempt(
    name: str,
    checking: Generator[None, None, tuple[float | None, str | None, bool]],
    ranks: Ranks | None,
) -> Generator[None, None, PathAttempt]:
    """Return the result of a check on all ranks."""
    difference, error, is_right = yield from checking
    logger.debug("path %s: difference %s, error %s", name, difference, error)
    return PathAttempt(name, difference, error, agreed(ranks, is_right))


def _alone(
    model: Any, backend: AttentionBackend, attempts: Sequence[PathAttempt] = ()
) -> AlonePath:
    if is_encoder_decoder(model):
        tried = "; ".join(f"{each.path}: {each.error or each.difference}" for each in attempts)
        raise ModelLoadError(f"the batched decoder differs from the model run alone ({tried})")
    if backend.quantisation is not None:
        raise ConfigError(
            "kv_cache_dtype must be auto: this model runs only with its own caches, which cannot "
            "be quantised."
        )
    return AlonePath(model)


def _runnable(
    path: ForwardPath,
    texts: Sequence[CheckedText],
    block_size: int,
    sources: CheckedSources | None,
) -> Generator[None, None, ForwardPath]:
    """Return the path if it runs with quantised KV; its difference from exact KV is only logged."""
    try:
        difference = yield from largest_difference(path, texts, block_size, sources)
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
    """Return the length beyond which a model attends to only a part of its past; None if never.

    The check's prompts are to exceed this length. A sparse attention's limit is preferred to a
    sliding window: which keys it selects must be tried, while windows too long to try are known to
    be right.
    """
    selected = max((_num_selected(module) for module in model.modules()), default=0)
    window = largest_window(layouts)
    if selected or window is None or window > MAX_CHECKED_SLIDE:
        return selected or None
    return window


def _num_selected(module: Any) -> int:
    """Return how many keys an attention module selects, by mlx_lm's names; 0 if it takes all."""
    tokens = getattr(module, "index_topk", None)
    blocks, size = (
        getattr(module, name, None) for name in ("index_topk_blocks", "index_block_size")
    )
    if isinstance(blocks, int) and isinstance(size, int):
        return blocks * size
    return tokens if isinstance(tokens, int) else 0


def largest_window(layouts: tuple[CacheLayout, ...]) -> int | None:
    """Return the longest sliding window of any layer, in tokens; None if there is none."""
    windows = [layout.window for layout in leaves(layouts) if isinstance(layout, KVLayout)]
    return max((window for window in windows if window is not None), default=None)


class _Candidates:
    """Makes the paths that could suit a model."""

    def __init__(
        self,
        model: Any,
        layouts: tuple[CacheLayout, ...],
        block_size: int,
        max_scores: float,
        selector: RowSelector,
    ) -> None:
        self._model = model
        self._layouts = layouts
        self._block_size = block_size
        self._max_scores = max_scores
        self.selector = selector

    def use(self, backend: AttentionBackend, num_blocks: int) -> Generator[None]:
        """Make the next paths with new pools of this backend."""
        shapes = [layout.shape for layout in leaves(self._layouts) if isinstance(layout, KVLayout)]
        self._backend = backend
        self._pools = KVPools(backend, shapes, num_blocks, fills=False)
        yield from self._pools.fill()

    def in_order(self) -> Iterator[tuple[str, Callable[[], ForwardPath]]]:
        """Yield names and makers of paths, from the fastest to the safest."""
        if self._layouts and all(isinstance(layout, KVLayout) for layout in self._layouts):
            if isinstance(self._backend, CompilableAttention):
                yield "packed (compiled)", lambda: self._packed(compiles=True)
            yield "packed", lambda: self._packed(compiles=False)
        if is_encoder_decoder(self._model):
            # Other paths have no sources.
            return
        users = find_cache_users(self._model)
        if not any(module is self._model for module in users.modules):
            yield from self._splits(users)
        yield "sequential", self._sequential

    def named(self, name: str) -> Callable[[], ForwardPath]:
        """Return the maker of the path of this name; raise ConfigError if the model has none."""
        for each, make in self.in_order():
            if each == name:
                return make
        raise ConfigError(f"There is no path {name!r} for this model on this device.")

    def _splits(self, users: CacheUsers) -> Iterator[tuple[str, Callable[[], ForwardPath]]]:
        has_kv = any(isinstance(layout, KVLayout) for layout in leaves(self._layouts))
        has_state = any(isinstance(layout, StateLayout) for layout in leaves(self._layouts))
        compiles = isinstance(self._backend, CompilableAttention)
        if has_kv and has_state:
            if compiles:
                yield (
                    "split (state, compiled)",
                    lambda: self._split(users.stateful, compiles=True, attends=False),
                )
            yield "split (state)", lambda: self._split(users.stateful, attends=False)
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
            self.selector,
            compiles=compiles,
        )

    def _split(
        self,
        modules: list[Any],
        *,
        batch_decode: bool = True,
        compiles: bool = False,
        attends: bool = True,
    ) -> ForwardPath:
        return SplitPath(
            self._model,
            self._views(),
            self._pools,
            self._backend,
            self.selector,
            modules,
            self._block_size,
            batch_decode=batch_decode,
            compiles=compiles,
            max_scores=self._max_scores if attends else math.inf,
        )

    def _sequential(self) -> ForwardPath:
        return SequentialPath(
            self._model, self._views(), self._pools, self._backend, self._block_size
        )

    def _views(self) -> CacheViews:
        return CacheViews(self._layouts, self._pools, self._backend)
