"""Opens the stores that the settings name, for one model."""

from __future__ import annotations

from mlx_parallm.config import CacheConfig
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.types.content import PendingContent


def open_tiers(
    cache: CacheConfig,
    *,
    owner: str,
    block_bytes: int,
    num_models: int,
    runs_ahead: bool,
    state_bytes: int = 0,
    draft: PendingContent | None = None,
) -> Tiers | None:
    """Return the stores of a model, nearest first; None if the settings name none.

    Args:
        cache: the settings.
        owner: digest of the model's ``Identity``.
        block_bytes: bytes of a block, those of a draft model included.
        state_bytes: bytes of a sequence's state; 0 for models without one.
        num_models: how many models share host memory.
        runs_ahead: whether the device computes steps while blocks are moved.
        draft: the lasting content of its draft model; None without one.
    """
    stores: list[BlockStore] = []
    if cache.kv_host_bytes:
        stores.append(HostStore(cache.kv_host_bytes // num_models))
    if cache.kv_disk is not None:
        largest = max(block_bytes, state_bytes)
        stores.append(DiskStore(cache.kv_disk, owner, cache.kv_disk_bytes, largest_bytes=largest))
    if not stores:
        return None
    return Tiers(
        stores,
        block_bytes=block_bytes,
        state_bytes=state_bytes,
        draft=draft,
        runs_ahead=runs_ahead,
    )
