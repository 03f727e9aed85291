"""Makes the places for prefixes that the settings name, for one model."""

from __future__ import annotations

import logging

from mlx_parallm.config import CacheConfig, KVPeersConfig
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.peer.peers import Peers
from mlx_parallm.generation.kv_cache.peer.prefill import Prefiller
from mlx_parallm.generation.kv_cache.peer.store import PeerStore
from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.step import RunnerInfo
from mlx_parallm.units import readable_bytes

logger = logging.getLogger(__name__)


def open_tiers(
    cache: CacheConfig,
    peers: KVPeersConfig | None = None,
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
        peers: likewise, of KV of other servers; None for none.
        owner: digest of the model's ``Identity``.
        block_bytes: bytes of a block, those of a draft model included.
        state_bytes: bytes of a sequence's state; 0 for models without one.
        num_models: how many models share host memory.
        runs_ahead: whether the device computes steps while blocks are moved.
        draft: the lasting content of its draft model; None without one.
    """
    stores: list[BlockStore] = []
    if cache.kv_host_bytes:
        limit = cache.kv_host_bytes // num_models
        _check_holds("--kv-host-bytes", limit, state_bytes)
        stores.append(HostStore(limit))
    if cache.kv_disk is not None:
        limit, largest = cache.kv_disk_bytes, max(block_bytes, state_bytes)
        _check_holds("--kv-disk-bytes", limit, state_bytes)
        stores.append(DiskStore(cache.kv_disk, owner, limit, largest_bytes=largest))
    exports = prefiller = None
    if peers is not None and peers.is_used and state_bytes:
        logger.warning(
            "--kv-peers, --kv-serve and --prefill-peer do nothing for a model that keeps a state, "
            "which is never sent: its prompts are computed where they arrive"
        )
    elif peers is not None and peers.is_used:
        # A draft model is noted in a byte behind each block.
        size = block_bytes + (draft is not None)
        exports = Exports(owner, size, peers.server_id) if peers.is_served else None
        if peers.urls:
            stores.append(_peer_store(peers, owner, size, exports))
        prefiller = _prefiller(peers, owner, size)
    if not stores and exports is None and prefiller is None:
        return None
    tiers = Tiers(
        stores,
        block_bytes=block_bytes,
        state_bytes=state_bytes,
        draft=draft,
        exports=exports,
        runs_ahead=runs_ahead,
    )
    tiers.prefiller = prefiller
    return tiers


def _peer_store(
    config: KVPeersConfig, owner: str, num_bytes: int, exports: Exports | None
) -> PeerStore:
    """Return the store of blocks that peers have, each of so many bytes."""
    # Servers without peers do not import an HTTP client.
    from mlx_parallm.generation.kv_cache.peer.http_link import HttpLinks  # noqa: PLC0415

    links = HttpLinks(config.urls, config.key, owner, num_bytes)
    uid = b"" if exports is None else exports.uid
    return PeerStore(Peers(links, owner, num_bytes, uid=uid), links.close)


def _prefiller(config: KVPeersConfig, owner: str, num_bytes: int) -> Prefiller | None:
    """Return what has prompts computed by another server; None if none does."""
    if config.prefill_url is None:
        return None
    from mlx_parallm.generation.kv_cache.peer.http_link import prefill_link  # noqa: PLC0415

    link, thread = prefill_link(config.prefill_url, config.key, owner, num_bytes)
    return Prefiller(
        link, thread, owner=owner, num_bytes=num_bytes, min_tokens=config.prefill_min_tokens
    )


def _check_holds(setting: str, limit: int, state_bytes: int) -> None:
    """Warn about a place that holds no state, and so is of no use to its model."""
    if state_bytes >= limit:
        sizes = readable_bytes(limit), readable_bytes(state_bytes)
        logger.warning(
            "%s: %s for a model do not hold its state, which takes %s: none of its prefixes is "
            "found there",
            *(setting, *sizes),
        )


def make_snapshots(
    share: KVShare, info: RunnerInfo, cache: CacheConfig, num_seqs: int
) -> StateSnapshots | None:
    """Return what keeps a model's states after prefixes; None without a state, or to keep none.

    Args:
        share: the model's share of the KV memory.
        info: facts about the model.
        cache: the settings.
        num_seqs: the most running sequences, whose slots come before those of snapshots.
    """
    if not info.has_state and cache.state_cache_bytes is not None:
        logger.warning("%s keeps no state, so it ignores --state-cache-memory", share.name)
    if not info.has_state or not cache.enable_prefix_caching:
        return None
    if info.state_bytes and share.num_snapshots:
        return StateSnapshots(num_seqs, share.num_snapshots, info.state_bytes)
    reason = f"its state is in caches of an unknown kind (path {info.path})"
    if info.state_bytes:
        size = readable_bytes(info.state_bytes)
        reason = f"the memory for states (--state-cache-memory) does not hold one of {size}"
    logger.warning("%s: no prefix is reused, because %s", share.name, reason)
    return None
