"""The address is taken before models load, so a wrong one is known at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mlx_parallm.api.http.listener import bind, inherit
from mlx_parallm.types.errors import ConfigError


def test_port_0_takes_a_free_port() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_in_use_is_named(listens: bool) -> None:
    """Check that a chosen port is in use before anybody listens on it."""
    with bind("127.0.0.1", 0) as first:
        if listens:
            first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            bind("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:8000"):
        bind("no.such.host.invalid", 8000)


def test_a_bound_socket_is_inherited() -> None:
    with bind("127.0.0.1", 0) as parents:
        address = parents.getsockname()
        with inherit(parents.detach()) as listener:
            assert listener.getsockname() == address
            listener.listen()
            socket.create_connection(address).close()


def test_a_descriptor_that_is_no_bound_tcp_socket_is_refused_and_stays_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fd: 1000000 is not an open socket"):
        inherit(1_000_000)
    with (tmp_path / "file").open("w") as file, pytest.raises(ConfigError, match="not an open"):
        inherit(file.fileno())
    for kind in ((socket.AF_INET,), (socket.AF_UNIX,), (socket.AF_INET, socket.SOCK_DGRAM)):
        with socket.socket(*kind) as other:
            with pytest.raises(ConfigError, match="not a TCP socket that is bound to a port"):
                inherit(other.fileno())
            other.getsockname()
