"""Names of peers: an address that one gets later gets neither requests nor the key."""

from __future__ import annotations

from collections.abc import Sequence

import httpx2
import pytest

from mlx_parallm import __version__
from mlx_parallm.replicas.names import PinnedNames, addresses_of
from mlx_parallm.replicas.peers import RELEASE_HEADER, PeerClient, parse_peer
from mlx_parallm.types.errors import PeerRefusedError, PeerSilentError

HEADERS = {RELEASE_HEADER: __version__}


class Resolver:
    """Answers with the addresses that a name has now; counts questions."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.num_asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        return self.addresses


class Network:
    """Servers by their addresses; keeps the requests that they get."""

    def __init__(self, *addresses: str) -> None:
        self.up = set(addresses)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.host not in self.up:
            raise httpx2.ConnectError("refused")
        self.requests.append(request)
        return httpx2.Response(200, headers=HEADERS, stream=httpx2.ByteStream(b"{}"))

    def client(self, resolver: Resolver, url: str) -> PeerClient:
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return PeerClient("secret", [parse_peer(url)], names=PinnedNames(resolver), _http=http)


async def ask(client: PeerClient) -> bytes:
    return (await client.ask(client.listed[0], "GET", "/x", within_s=None)).body


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_name_is_resolved_once_and_kept_in_the_request(scheme: str) -> None:
    resolver, network = Resolver("10.0.0.2"), Network("10.0.0.2", "10.6.6.6")
    client = network.client(resolver, f"{scheme}://fleet:8000")
    await ask(client)
    resolver.addresses = ("10.6.6.6",)
    await ask(client)
    assert resolver.num_asked == 1
    for request in network.requests:
        assert str(request.url) == f"{scheme}://10.0.0.2:8000/x"
        assert request.headers["host"] == "fleet:8000"
        # That is the name in TLS, which the certificate must be for.
        assert request.extensions["sni_hostname"] == "fleet"


async def test_an_address_that_changes_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    resolver, network = Resolver("10.0.0.2"), Network("10.6.6.6")
    client = network.client(resolver, "http://fleet:8000")
    await client.pin()
    with pytest.raises(PeerSilentError):
        await ask(client)
    resolver.addresses = ("10.6.6.6",)
    for _ in range(3):
        with pytest.raises(PeerRefusedError, match=r"had the address 10\.0\.0\.2 and has 10\.6"):
            await ask(client)
    assert not network.requests
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text
    network.up.add("10.0.0.2")
    await ask(client)


async def test_all_addresses_of_the_first_time_are_tried() -> None:
    network = Network("10.0.0.2")
    client = network.client(Resolver("10.0.0.1", "10.0.0.2"), "http://fleet:8000")
    await ask(client)
    assert [each.url.host for each in network.requests] == ["10.0.0.2"]


async def test_a_name_that_is_not_known_yet_is_asked_for_again() -> None:
    resolver, network = Resolver(), Network("10.0.0.2")
    client = network.client(resolver, "http://fleet:8000")
    await client.pin()
    with pytest.raises(PeerSilentError, match="not known"):
        await ask(client)
    resolver.addresses = ("10.0.0.2",)
    await ask(client)


@pytest.mark.parametrize("host", ["10.0.0.2", "[::1]"])
async def test_addresses_are_not_looked_up(host: str) -> None:
    resolver, network = Resolver("10.6.6.6"), Network(host.strip("[]"))
    await ask(network.client(resolver, f"http://{host}:8000"))
    assert not resolver.num_asked


@pytest.mark.parametrize("host", ["kv..cluster", "a" * 64 + ".b", "no-such-host.invalid"])
async def test_what_no_resolver_knows_has_no_addresses(host: str) -> None:
    assert await addresses_of(host, 80) == ()
