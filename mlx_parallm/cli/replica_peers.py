"""Checks of the settings of servers that change together."""

from __future__ import annotations

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError


def check_replicas(server: ServerConfig) -> None:
    """Raise ConfigError if the settings of peers do not fit together, or an address is none."""
    if not server.peers:
        for flag, value in (("--peer-key", server.peer_key), ("--peer-url", server.peer_url)):
            if value is not None:
                raise ConfigError(f"{flag} needs --peers.")
        return
    if server.peer_key is not None and not (server.admin_api_keys or server.api_keys):
        raise ConfigError("--peer-key needs --admin-api-key: peers would change this server too.")
    # Servers without peers do not import an HTTP client.
    from mlx_parallm.replicas.peers import parse_peer, parse_peers  # noqa: PLC0415

    parse_peers(server.peers)
    if server.peer_url is not None:
        parse_peer(server.peer_url, "--peer-url")
