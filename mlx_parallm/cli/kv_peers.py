"""Checks of the settings of KV of other servers."""

from __future__ import annotations

import secrets
from dataclasses import replace

from mlx_parallm.api.http.auth import is_loopback_host
from mlx_parallm.config import EngineConfig, KVPeersConfig
from mlx_parallm.generation.kv_cache.peer.filters import UID_BYTES
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError

PREFILL_FLAG = "--prefill-peer"


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
    flags = {"--kv-peers": peers.urls, "--kv-serve": peers.is_served}
    flag = next((name for name, value in flags.items() if value), PREFILL_FLAG)
    if not engine.cache.enable_prefix_caching:
        raise ConfigError(
            f"{flag} shares cached prefixes: it cannot be used without prefix caching "
            "(--no-enable-prefix-caching)."
        )
    if peers.is_served:
        _check_admin(server)
    # Servers without peers do not import an HTTP client.
    from mlx_parallm.replicas.peers import parse_peer, parse_peers  # noqa: PLC0415

    if peers.urls:
        parse_peers(peers.urls, "--kv-peers")
    if peers.prefill_url is not None:
        parse_peer(peers.prefill_url, PREFILL_FLAG)
    keys = filter(None, (server.peer_key, *server.admin_api_keys, *server.api_keys))
    server_id = secrets.token_bytes(UID_BYTES)
    return replace(peers, key=next(keys, None), server_id=server_id)


def _check_admin(server: ServerConfig) -> None:
    """Raise ConfigError if clients could read KV, which shows what prompts are cached.

    Without an admin key their keys may do what an admin may.
    """
    if server.admin_api_keys:
        return
    # A socket that is passed was bound elsewhere.
    is_local = server.fd is not None or is_loopback_host(server.host)
    if server.api_keys or not is_local:
        raise ConfigError(
            "--kv-serve needs --admin-api-key: KV shows the prompts of all clients. Without any "
            "key it can be used on a loopback address only, such as --host 127.0.0.1."
        )
