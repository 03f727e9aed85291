"""Checks of the settings of KV of other servers."""

from __future__ import annotations

from dataclasses import replace

from mlx_parallm.config import EngineConfig, KVPeersConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError


def checked_peers(engine: EngineConfig, server: ServerConfig) -> KVPeersConfig:
    """Return the settings of KV of other servers, with the key that these are sent.

    Raises:
        ConfigError: they do not fit together, or an address is none.
    """
    peers = engine.kv_peers
    if not peers.is_used:
        if peers.across_devices:
            raise ConfigError("--kv-across-devices needs --kv-peers or --kv-serve.")
        return peers
    flag = "--kv-peers" if peers.urls else "--kv-serve"
    if not engine.cache.enable_prefix_caching:
        raise ConfigError(
            f"{flag} shares cached prefixes: it cannot be used without prefix caching "
            "(--no-enable-prefix-caching)."
        )
    if peers.is_served and server.data_parallel_size != 1:
        raise ConfigError(
            "--kv-serve cannot be used with --data-parallel-size: a peer could not know which "
            "engine has a prefix. Serve one engine, or share --kv-disk."
        )
    # Servers without peers do not import an HTTP client.
    from mlx_parallm.replicas.peers import parse_peers  # noqa: PLC0415

    parse_peers(peers.urls, "--kv-peers")
    keys = (*server.admin_api_keys, *server.api_keys)
    return replace(peers, key=keys[0] if keys else None)
