"""Checks of the settings of servers that change together."""

from __future__ import annotations

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError


def check_replicas(server: ServerConfig, *, asks_for_kv: bool = False) -> None:
    """Raise ConfigError if the settings of peers do not fit together, or an address is none.

    ``asks_for_kv``: the key is sent to peers that have KV, too.
    """
    if not server.peers:
        if server.peer_key is not None and not asks_for_kv:
            raise ConfigError("--peer-key needs --peers, --kv-peers or --prefill-peer.")
        if server.peer_url is not None:
            raise ConfigError("--peer-url needs --peers.")
        return
    if server.peer_key is not None and not (server.admin_api_keys or server.api_keys):
        raise ConfigError("--peer-key needs --admin-api-key: peers would change this server too.")
    check_has_keys("--peers", server)
    # Servers without peers do not import an HTTP client.
    from mlx_parallm.replicas.peers import parse_peer, parse_peers  # noqa: PLC0415

    parse_peers(server.peers)
    if server.peer_url is not None:
        parse_peer(server.peer_url, "--peer-url")


def check_has_keys(flag: str, server: ServerConfig) -> None:
    """Raise ConfigError if other machines reach the routes of a flag without any key."""
    from mlx_parallm.api.http.auth import is_loopback_host  # noqa: PLC0415

    if not (server.admin_api_keys or server.api_keys or is_loopback_host(server.host)):
        raise ConfigError(
            f"{flag} on {server.host} needs --admin-api-key: whoever reaches this port could "
            "change the server."
        )
