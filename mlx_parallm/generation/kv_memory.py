"""Shares out the memory that the KV of all generation models gets, beside their weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mlx_parallm.config import CacheConfig, MemoryBound
from mlx_parallm.engine.kind import MemoryWish
from mlx_parallm.generation.kv_cache.budget import least_bytes, most_bytes
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import KVPlan
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.device.memory_limits import host_free_bytes
from mlx_parallm.worker.device.properties import (
    active_memory_bytes,
    backend_name,
    free_memory_bytes,
)
from mlx_parallm.worker.worker import Worker

logger = logging.getLogger(__name__)

# LATER_BYTES: bound on the KV of a small model that is loaded later on the CPU.
LATER_BYTES = 256 << 20
# STEP_BYTES: free memory that the KV pool leaves for the arrays of a step.
STEP_BYTES = 256 << 20


def kv_budget(
    plans: Sequence[KVPlan],
    weight_bytes: int,
    cache: CacheConfig,
    worker: Worker,
    limit: MemoryBound | None = None,
) -> int:
    """Return the bytes of KV for all models: as configured, or what is free and sensible.

    Args:
        plans: the claims of the models.
        weight_bytes: of all models together.
        cache: the settings.
        worker: has the models.
        limit: on weights and KV together; None for none.

    Raises:
        ConfigError: so much is not free, or the limit leaves nothing.
    """
    if not plans:
        return 0
    free = free_bytes(worker, cache.num_engines)
    if free == 0 and backend_name() == "metal":
        raise ConfigError(_no_room(cache.num_engines))
    available = None if free is None else weight_bytes + free
    most = None if limit is None else limit.num_bytes(available)
    left = None if most is None else most - weight_bytes
    if left is not None and left < (cache.kv_cache_bytes or 1):
        raise ConfigError(
            f"The weights take {readable_bytes(weight_bytes)}, and --memory leaves "
            f"{readable_bytes(max(0, left))} for KV."
        )
    if cache.kv_cache_bytes is not None:
        return _configured_bytes(cache, free)
    unused = host_free_bytes()
    budget = sum(plan.wanted_bytes for plan in plans)
    if free is not None:
        budget = min(budget, int(free * cache.memory_fraction))
    if left is not None:
        budget = min(budget, left)
    bound = most_bytes(
        backend_name(), weight_bytes, free if unused is None else unused, cache.num_engines
    )
    if bound is None or budget <= bound:
        return budget
    logger.info(
        "KV takes at most %s of this machine's memory unless --kv-cache-memory-bytes says more",
        readable_bytes(bound),
    )
    return bound


def kv_wish(plan: KVPlan, weight_bytes: int, cache: CacheConfig, *, may_cut: bool) -> MemoryWish:
    """Return the KV memory that a model needs which is loaded while others serve.

    Args:
        plan: its claim.
        weight_bytes: the size of its weights.
        cache: the settings.
        may_cut: True if it may serve a shorter context than its own.
    """
    context = plan.context_blocks * plan.block_bytes
    least = least_bytes(context, plan.block_bytes, plan.state_bytes)
    wanted = cache.kv_cache_bytes
    if wanted is None:
        bound = _later_bound(weight_bytes, cache.num_engines)
        wanted = plan.wanted_bytes if bound is None else min(plan.wanted_bytes, bound)
    smallest = plan.block_bytes + plan.state_bytes if may_cut else least
    return MemoryWish(smallest=smallest, least=least, wanted=max(wanted, least))


def _later_bound(weight_bytes: int, num_engines: int) -> int | None:
    """Return the most bytes of KV that suit a model which is loaded later; None without a bound."""
    if backend_name() == "cpu":
        # The CPU fills a pool, while streams of other models wait for it.
        return max(LATER_BYTES, weight_bytes)
    return most_bytes(backend_name(), weight_bytes, host_free_bytes(), num_engines)


def _no_room(num_engines: int) -> str:
    """Return why nothing is left for KV on a Mac."""
    models = "The models" if num_engines == 1 else f"The models of {num_engines} engines"
    size = readable_bytes(num_engines * active_memory_bytes())
    return (
        f"{models} take {size}, and Metal recommends no more than that for all programs of this "
        "Mac: serve smaller or more quantised models, or fewer engines. The limit of macOS is "
        "iogpu.wired_limit_mb."
    )


def _configured_bytes(cache: CacheConfig, free: int | None) -> int:
    """Return the configured number of bytes.

    Raises:
        ConfigError: so much is not free.
    """
    num_bytes = cache.kv_cache_bytes
    assert num_bytes is not None
    # Metal recommends one size for all engines; elsewhere the system says what others have taken.
    others = num_bytes * (cache.num_engines - 1) if backend_name() == "metal" else 0
    if free is not None and num_bytes + others + STEP_BYTES > free:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {readable_bytes(num_bytes + others)}; only "
            f"{readable_bytes(max(0, free - STEP_BYTES))} are free beside the models."
        )
    return num_bytes


def free_bytes(worker: Worker, num_engines: int = 1) -> int | None:
    """Return the bytes that models may still take on each device of a worker; None if unknown."""
    # Memory that loading took and no longer needs would count as taken.
    worker.give_back()
    return worker.least_free(free_memory_bytes(num_engines))
