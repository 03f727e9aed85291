"""Servers of a fleet know who is behind, who is ahead, and who had other changes."""

from __future__ import annotations

import asyncio

import pytest

from mlx_parallm.replicas.fleet import POLL_S
from mlx_parallm.replicas.member import STAGE_S
from mlx_parallm.replicas.past import Past
from mlx_parallm.replicas.peers import Peer
from mlx_parallm.replicas.standing import Relation, View, standing
from mlx_parallm.types.errors import PeerSilentError
from tests.replica_fleet import Network, adapter, update
from tests.unit.replicas.test_fleet import check_alike, fleet
from tests.virtual_time import in_virtual_time

A, D, E = Peer("a"), Peer("d"), Peer("e")


@in_virtual_time
async def test_staging_may_take_longer_than_a_staged_change_lasts() -> None:
    async with fleet() as network:
        network.server(2).host.delay_s = STAGE_S + 10
        for number in range(3):
            await network.server(number).change(update(), b"%d" % number)
        network.server(2).host.delay_s = 0.0
        await asyncio.sleep(2 * POLL_S)
        check_alike(network)


async def change_apart(network: Network, *, until_s: float) -> None:
    """Let server 0 change alone, and server 1 commit another change at a time in the future."""
    network.cut([0], [1])
    await asyncio.sleep(5 * POLL_S)
    for server in network.servers.values():
        await server.fleet.apply(force=True)
    await network.server(0).change(update(), b"here")
    network.server(1).host.delay_s = until_s / 2
    network.server(1).run(network.server(1).change(update(), b"there"))


@in_virtual_time
async def test_a_change_during_a_look_is_not_lost() -> None:
    async with fleet(2) as network:
        await change_apart(network, until_s=4.0)
        await asyncio.sleep(2.5)
        # The answers to the next questions come after the commit.
        network.latency_s, network.cuts = 1.5, set()
        await asyncio.sleep(4.0 + 5 * POLL_S)
        network.latency_s = 0.001
        await asyncio.sleep(3 * POLL_S)
        labels = {server.host.label for server in network.servers.values()}
        assert len(labels) == 2
        ready = [each for each in network.servers.values() if each.fleet.why_not_ready is None]
        assert ready == [network.server(0)]


@in_virtual_time
async def test_a_server_does_not_become_like_one_that_is_not_ahead() -> None:
    async with fleet(2) as network:
        await network.server(0).change(adapter(), b"both")
        network.cut([0], [1])
        await asyncio.sleep(5 * POLL_S)
        for number in range(2):
            await network.server(number).fleet.apply(force=True)
            await network.server(number).change(adapter(), b"%d" % number)
        network.cuts = set()
        first, second = (network.server(number) for number in range(2))
        before = second.member.state.digest
        # Its changes have come after another state of this server was decided to be behind.
        await second.fleet.become(first.peer)
        await second.fleet.become(first.peer, over="an earlier state")
        assert second.member.state.digest == before
        first.member.state.leave(())
        await second.fleet.become(first.peer, over=before)
        assert second.member.state.digest == before


@in_virtual_time
async def test_a_server_that_caught_up_knows_what_was_before() -> None:
    async with fleet() as network:
        for name in "ab":
            await network.server(0).change(adapter(name), b"x")
        network.cut([1], [0, 2])
        await asyncio.sleep(5 * POLL_S)
        for number in (0, 2):
            await network.server(number).fleet.apply(force=True)
        await network.server(0).change(adapter("c"), b"x")
        network.kill(network.peers[2])
        network.start(network.peers[2])
        await asyncio.sleep(5 * POLL_S)
        network.kill(network.peers[0])
        network.cuts = set()
        await asyncio.sleep(5 * POLL_S)
        check_alike(network)
        assert set(network.server(1).host.adapters) == {"a", "b", "c"}


@in_virtual_time
async def test_numbers_that_were_labels_are_not_given_again() -> None:
    async with fleet() as network:
        await network.server(0).change({**update(), "version": "7"}, b"seven")
        await network.server(0).change({**update(), "version": "mine"}, b"mine")
        network.kill(network.peers[2])
        network.start(network.peers[2])
        await asyncio.sleep(3 * POLL_S)
        # All of the servers that were there are gone, one after another.
        for number in (0, 1):
            network.kill(network.peers[number])
            network.start(network.peers[number])
            await asyncio.sleep(3 * POLL_S)
        outcomes = [await network.server(0).change(update(), b"%d" % number) for number in range(8)]
        assert "7" not in {label for each in outcomes for label in each.versions.values()}


async def no_journal(peer: Peer) -> Past:
    raise PeerSilentError(f"{peer} was lost.")


@in_virtual_time
async def test_numbers_that_a_peer_had_heard_of_are_not_given_again() -> None:
    async with fleet(2) as network:
        await network.server(0).change(update(), b"one")
        network.kill(network.peers[1])
        network.start(network.peers[1])
        # It asks how its peer is, and gets no journal.
        network.server(1).fleet.transport.past = no_journal
        await asyncio.sleep(3 * POLL_S)
        network.kill(network.peers[0])
        network.start(network.peers[0])
        await asyncio.sleep(3 * POLL_S)
        outcome = await network.server(0).change(update(), b"two")
        assert "1" not in outcome.versions.values()
        check_alike(network)


@pytest.mark.parametrize("digest", ["mixed", "before"])
def test_servers_behind_both_halves_count_for_neither(digest: str) -> None:
    third = View(digest, 1, Relation.BEHIND)
    first = standing(A, 5, {D: View("y", 5, Relation.FORKED), E: third})
    second = standing(D, 5, {A: View("x", 5, Relation.FORKED), E: third})
    assert (first.is_ready, second.is_ready) == (True, False)


def test_larger_halves_count_as_larger() -> None:
    small = standing(A, 5, {D: View("y", 5, Relation.FORKED), E: View("y", 5, Relation.FORKED)})
    large = standing(D, 5, {A: View("x", 5, Relation.FORKED), E: View("y", 5, Relation.SAME)})
    assert (small.is_ready, large.is_ready) == (False, True)
