"""Servers whose peers refuse them, leave the list, cannot catch up, or start their engines anew."""

from __future__ import annotations

import asyncio

import pytest

from mlx_parallm.replicas.fleet import POLL_S
from mlx_parallm.replicas.names import LastNames
from mlx_parallm.replicas.peers import Peer
from mlx_parallm.types.errors import ConflictError, PeerSilentError
from tests.replica_fleet import Network, Server, adapter, update
from tests.unit.replicas.test_fleet import check_alike, fleet
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_server_that_all_refuse_is_not_ready() -> None:
    async with fleet(2) as network:
        await network.server(0).change(update(), b"one")
        network.kill(network.peers[1])
        network.start(network.peers[1])
        network.strangers = {network.peers[1]}
        await asyncio.sleep(3 * POLL_S)
        assert "wrong key" in (network.server(1).fleet.why_not_ready or "")
        # A stranger does not keep a server from serving that has had the fleet's changes.
        assert network.server(0).fleet.why_not_ready is None
        network.strangers = set()
        await asyncio.sleep(3 * POLL_S)
        check_alike(network)


@in_virtual_time
async def test_a_server_that_all_refuse_is_ready_if_an_operator_says_so() -> None:
    async with fleet(2) as network:
        network.kill(network.peers[1])
        network.start(network.peers[1])
        network.strangers = {network.peers[1]}
        await asyncio.sleep(3 * POLL_S)
        await network.server(1).fleet.apply(force=True)
        assert network.server(1).fleet.why_not_ready is None


def list_only(server: Server, *peers: Peer) -> None:
    async def listed() -> tuple[Peer, ...]:
        return peers

    server.fleet._listed = listed


@in_virtual_time
async def test_a_peer_that_left_the_list_may_be_changing_apart() -> None:
    async with fleet(2) as network:
        for server in network.servers.values():
            list_only(server, server.peer)
        await asyncio.sleep(2 * POLL_S)
        for server in network.servers.values():
            assert server.fleet.why_not_ready is None
            with pytest.raises(PeerSilentError, match="no longer listed"):
                await server.change(update(), b"x")
            await server.fleet.apply(force=True)
        # Versions of different contents have different labels.
        for number, server in enumerate(network.servers.values()):
            await server.change(update(), b"%d" % number)


@in_virtual_time
async def test_a_second_address_that_left_is_nobody() -> None:
    async with fleet(2) as network:
        second = Peer("http://[::1]:8000")
        network.servers[second] = network.server(0)
        list_only(network.server(0), *network.peers, second)
        await asyncio.sleep(2 * POLL_S)
        list_only(network.server(0), *network.peers)
        await asyncio.sleep(2 * POLL_S)
        del network.servers[second]
        await network.server(0).change(update(), b"x")
        check_alike(network)


@in_virtual_time
async def test_nothing_changes_while_a_name_is_not_known() -> None:
    async def unknown() -> tuple[Peer, ...]:
        raise PeerSilentError("The name fleet is not known.")

    async with fleet(2) as network:
        network.server(0).fleet._listed = unknown
        with pytest.raises(PeerSilentError):
            await network.server(0).change(update(), b"x")


async def test_a_name_keeps_its_addresses_while_it_cannot_be_resolved() -> None:
    answers = [(), ("10.0.0.1", "10.0.0.2"), (), ("10.0.0.2",), ()]

    async def lookup(host: str, port: int) -> tuple[str, ...]:
        return answers.pop(0)

    names = LastNames(lookup)
    with pytest.raises(PeerSilentError, match="fleet is not known"):
        await names("fleet", 80)
    assert [list(await names("fleet", 80)) for _ in range(4)] == [
        ["10.0.0.1", "10.0.0.2"],
        ["10.0.0.1", "10.0.0.2"],
        ["10.0.0.2"],
        ["10.0.0.2"],
    ]


async def behind(network: Network) -> Server:
    """Return a server that is reachable and cannot catch up."""
    network.kill(network.peers[2])
    await asyncio.sleep(2 * POLL_S)
    await network.server(0).fleet.apply(force=True)
    await network.server(0).change(adapter("a"), b"1")
    network.start(network.peers[2])
    network.server(2).host.refuses = True
    await asyncio.sleep(5 * POLL_S)
    return network.server(2)


@in_virtual_time
async def test_a_peer_that_cannot_catch_up_is_named_with_its_reason() -> None:
    async with fleet() as network:
        await behind(network)
        with pytest.raises(ConflictError, match=r"10\.0\.0\.3:8000 is not.*This does not fit"):
            await network.server(1).change(adapter("b"), b"2")


@in_virtual_time
async def test_a_peer_that_cannot_catch_up_is_excused_by_force() -> None:
    async with fleet() as network:
        late = await behind(network)
        await network.server(1).fleet.apply(force=True)
        await network.server(1).change(adapter("b"), b"2")
        assert "does not fit" in (late.fleet.why_not_ready or "")
        late.host.refuses = False
        await asyncio.sleep(3 * POLL_S)
        assert network.server(1).fleet.excused == set()
        check_alike(network)
        assert set(late.host.adapters) == {"a", "b"}


@in_virtual_time
async def test_engines_that_start_anew_alone_are_not_ready() -> None:
    async with fleet(2) as network:
        await network.server(0).change(update(), b"one")
        network.kill(network.peers[1])
        await asyncio.sleep(2 * POLL_S)
        server = network.server(0)
        server.host.weights, server.host.label = {}, "0"
        server.fleet.forget()
        for _ in range(3):
            assert "started anew" in (server.fleet.why_not_ready or "")
            await asyncio.sleep(POLL_S)
        await server.fleet.apply(force=True)
        assert server.fleet.why_not_ready is None
