"""The address is taken before models load, so a wrong one is known at once."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from pathlib import Path
from typing import Any, Self, cast

import pytest

from mlx_parallm.api.http.listener import LOCALHOST, bind, bind_all, inherit
from mlx_parallm.types.errors import ConfigError

# ANY: the name of every address, IPv4 and IPv6.
ANY = "*"


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


def has_ipv6() -> bool:
    """True if this machine has ::1."""
    with contextlib.suppress(ConfigError), bind("::1", 0):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("is_chosen", [True, False])
def test_localhost_is_both_loopback_addresses(is_chosen: bool) -> None:
    port = 0
    if is_chosen:
        for free in bind_all(LOCALHOST, 0):
            with free:
                port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in bind_all(LOCALHOST, port)]
        hosts, ports = zip(*(each.getsockname()[:2] for each in listeners), strict=True)
        assert hosts == ("127.0.0.1", "::1")
        assert len(set(ports)) == 1
        assert not is_chosen or ports[0] == port


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_name_of_both_wildcards_is_served_on_both(
    monkeypatch: pytest.MonkeyPatch, is_reversed: bool, is_chosen: bool
) -> None:
    """Bind them in either order: a socket of ``::`` that takes IPv4 would refuse the other."""
    port = 0
    if is_chosen:
        with bind("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
    addresses = socket.getaddrinfo(ANY, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    hosts = [place[0] for *_, place in addresses]
    assert sorted(map(str, hosts)) == ["0.0.0.0", "::"]

    def resolve(_host: str, port: int, **_: Any) -> list[Any]:
        ordered = addresses[::-1] if is_reversed else addresses
        return [(*each, (place[0], port, *place[2:])) for *each, place in ordered]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in bind_all(ANY, port)]
        assert [each.getsockname()[0] for each in listeners] == hosts[:: -1 if is_reversed else 1]
        for listener in listeners:
            listener.listen()
        monkeypatch.undo()
        (shared,) = {each.getsockname()[1] for each in listeners}
        assert shared == port or not is_chosen
        for loopback in ("127.0.0.1", "::1"):
            socket.create_connection((loopback, shared)).close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_every_ipv6_address_alone_takes_ipv4_too() -> None:
    (listener,) = bind_all("::", 0)
    with listener:
        listener.listen()
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


def test_an_address_that_the_machine_lacks_is_left_out() -> None:
    def make(family: int, kind: int, protocol: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return socket.socket(family, kind, protocol)

    (listener,) = bind_all(LOCALHOST, 0, make_socket=make)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot listen on ::1:0: Address family not supported"):
        bind_all("::1", 0, make_socket=make)


class DarwinNetwork:
    """Makes sockets whose ports conflict as on macOS (in_pcbbind of XNU).

    Attributes:
        bound: the sockets that are bound.
        free: ports that the kernel would choose next.
    """

    def __init__(self) -> None:
        self.bound: list[DarwinSocket] = []
        self.free = [50_000, 50_001, 50_002]

    def socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        return cast("socket.socket", DarwinSocket(self, family))

    def bind(self, host: str, port: int) -> DarwinSocket:
        """Bind a socket of another server, as most do."""
        other = DarwinSocket(self, socket.AF_INET6 if ":" in host else socket.AF_INET)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, port))
        return other


class DarwinSocket:
    """A socket of ``DarwinNetwork``."""

    def __init__(self, network: DarwinNetwork, family: int) -> None:
        self._network = network
        self._family = family
        self._reuses = False
        self._has_ipv4 = True
        self._place: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def setsockopt(self, level: int, name: int, value: int) -> None:
        match level, name, value:
            case socket.SOL_SOCKET, socket.SO_REUSEADDR, 1:
                self._reuses = True
            case socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1:
                self._has_ipv4 = False
            case _:
                raise AssertionError((level, name, value))

    def bind(self, place: tuple[Any, ...]) -> None:
        host, port = place[:2]
        port = port or self._network.free.pop(0)
        if any(self._conflicts(host, port, other) for other in self._network.bound):
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self._place = host, port
        self._network.bound.append(self)

    def getsockname(self) -> tuple[str, int]:
        assert self._place is not None
        return self._place

    def close(self) -> None:
        if self in self._network.bound:
            self._network.bound.remove(self)

    def _conflicts(self, host: str, port: int, other: DarwinSocket) -> bool:
        others_host, others_port = other.getsockname()
        if port != others_port:
            return False
        # A socket of every IPv6 address has every IPv4 address too, unless it gave them up.
        if self._family != other._family and not (self._has_ipv4 and other._has_ipv4):
            return False
        wildcards = {"0.0.0.0", "::"}
        if host in wildcards and others_host in wildcards:
            return True
        is_wild = host in wildcards or others_host in wildcards
        return host == others_host or (is_wild and not self._reuses)


@pytest.mark.parametrize(
    ("others", "host", "is_in_use"),
    [
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("::", "::1", True),
        ("0.0.0.0", "10.0.0.1", True),
        ("0.0.0.0", "localhost", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "*", True),
        ("::1", "*", True),
        ("0.0.0.0", "*", True),
        ("::", "*", True),
        ("10.0.0.2", "*", False),
        ("::1", "localhost", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "::", True),
        ("::1", "::", True),
        ("0.0.0.0", "::", True),
        ("0.0.0.0", "::1", False),
        ("10.0.0.2", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),
        ("::1", "0.0.0.0", False),
    ],
)
def test_a_port_of_a_wider_or_narrower_server_is_in_use(
    others: str, host: str, is_in_use: bool
) -> None:
    network = DarwinNetwork()
    network.bind(others, 8000)
    if is_in_use:
        with pytest.raises(
            ConfigError, match=rf"cannot listen on {re.escape(host)}:8000: Address already"
        ):
            bind_all(host, 8000, make_socket=network.socket, shares_ports=True)
        assert len(network.bound) == 1
    else:
        bind_all(host, 8000, make_socket=network.socket, shares_ports=True)
        assert {each.getsockname()[1] for each in network.bound} == {8000}


def test_a_free_port_is_free_at_every_address() -> None:
    network = DarwinNetwork()
    network.bind("::1", 50_000)
    network.bind("0.0.0.0", 50_001)
    listeners = bind_all(LOCALHOST, 0, make_socket=network.socket, shares_ports=True)
    assert [each.getsockname() for each in listeners] == [("127.0.0.1", 50_002), ("::1", 50_002)]


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
