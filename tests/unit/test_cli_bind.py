"""The address is taken before models load, so a wrong one is known at once."""

from __future__ import annotations

import pytest

from mlx_parallm.cli.serve import bind
from mlx_parallm.config import ServerConfig
from mlx_parallm.errors import ConfigError


def test_port_0_takes_a_free_port() -> None:
    with bind(ServerConfig(port=0)) as listener:
        assert listener.getsockname()[1] > 0


def test_a_port_in_use_is_named() -> None:
    with bind(ServerConfig(port=0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            bind(ServerConfig(port=port))


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:8000"):
        bind(ServerConfig(host="no.such.host.invalid"))
