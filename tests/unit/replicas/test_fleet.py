"""Changes reach all servers of a fleet or none, while some die, are cut off, slow or refuse."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager

import pytest

from mlx_parallm.replicas.entries import Head
from mlx_parallm.replicas.fleet import POLL_S
from mlx_parallm.replicas.member import STAGE_S
from mlx_parallm.replicas.peers import Peer
from mlx_parallm.types.errors import ConflictError, ParallmError, PeerSilentError
from tests.replica_fleet import Network, Server, adapter, from_folder, ignoring, settle, update
from tests.virtual_time import in_virtual_time, run_virtual

# LOOKS_S: by then each server has looked at the others, slow and silent ones too.
LOOKS_S = 20.0


@asynccontextmanager
async def fleet(num_servers: int = 3) -> AsyncGenerator[Network]:
    """Provide a fleet whose servers have seen each other."""
    network = Network(num_servers)
    await asyncio.sleep(2 * POLL_S)
    try:
        yield network
    finally:
        network.close()


def check_alike(network: Network) -> None:
    """Check that all servers are ready, alike, and hold nothing that is staged."""
    servers = list(network.servers.values())
    for server in servers:
        assert server.fleet.why_not_ready is None
        assert server.host.facts == servers[0].host.facts
        assert server.member.state.digest == servers[0].member.state.digest
        assert server.host.num_staged == server.member.num_staged_bytes == 0
        assert server.member.staged is None


@in_virtual_time
async def test_a_change_reaches_all() -> None:
    async with fleet() as network:
        outcome = await network.server(1).change(adapter(), b"one")
        assert outcome.versions == {str(peer): "1" for peer in network.peers}
        await network.server(2).change(update(), b"two")
        await network.server(0).change({"kind": "pause", "mode": "keep", "clear_cache": False})
        check_alike(network)
        assert network.server(0).host.is_paused


@in_virtual_time
async def test_a_refusal_anywhere_leaves_all_as_they_were() -> None:
    async with fleet() as network:
        for number in range(3):
            network.server(number).host.refuses = True
            with pytest.raises(ParallmError, match="does not fit"):
                await network.server(1).change(adapter(), b"one")
            network.server(number).host.refuses = False
            check_alike(network)
            assert network.server(1).host.adapters == {}
        await network.server(1).change(adapter(), b"one")
        check_alike(network)


@in_virtual_time
async def test_a_silent_peer_is_named_and_nothing_changes() -> None:
    async with fleet() as network:
        network.kill(network.peers[2])
        with pytest.raises(PeerSilentError, match=r"10\.0\.0\.3.*--force"):
            await network.server(0).change(adapter(), b"one")
        assert network.server(0).host.adapters == {}
        network.start(network.peers[2])
        await asyncio.sleep(2 * POLL_S)
        await network.server(0).change(adapter(), b"one")
        check_alike(network)


@in_virtual_time
async def test_a_pause_that_one_cannot_hear_pauses_nobody() -> None:
    async with fleet() as network:
        network.kill(network.peers[1])
        with pytest.raises(PeerSilentError):
            await network.server(0).change({"kind": "pause", "mode": "keep", "clear_cache": False})
        network.start(network.peers[1])
        await asyncio.sleep(3 * POLL_S)
        check_alike(network)
        assert not network.server(0).host.is_paused


@in_virtual_time
async def test_changes_at_once_come_one_after_another() -> None:
    async with fleet() as network:
        changes = [
            network.server(number % 3).change(adapter(f"a{number}"), b"%d" % number)
            for number in range(6)
        ]
        outcomes = await asyncio.gather(*changes)
        labels = [outcome.versions[str(network.peers[0])] for outcome in outcomes]
        assert len(set(labels)) == 6
        check_alike(network)


@in_virtual_time
async def test_a_coordinator_that_dies_before_the_commit_leaves_nothing() -> None:
    async with fleet() as network:
        network.server(2).host.delay_s = 5.0
        network.server(1).run(network.server(1).change(adapter(), b"one"))
        await asyncio.sleep(1.0)
        network.kill(network.peers[1])
        await asyncio.sleep(STAGE_S + 10)
        assert network.server(0).host.num_staged == 0
        network.start(network.peers[1])
        await settle(network)
        check_alike(network)
        assert network.server(0).host.adapters == {}
        network.server(2).host.delay_s = 0.0
        await network.server(0).change(adapter(), b"two")
        check_alike(network)


@in_virtual_time
async def test_a_peer_that_dies_between_stage_and_commit_comes_back_with_the_change() -> None:
    async with fleet() as network:
        network.server(0).host.delay_s = 5.0
        change = network.server(1).run(network.server(1).change(adapter(), b"one"))
        network.server(1).host.delay_s = 2.0
        # The lowest stages for 5 s, the others for less, and then the coordinator commits for 2 s.
        await asyncio.sleep(6.0)
        network.kill(network.peers[2])
        outcome = await change
        assert outcome.versions[str(network.peers[2])] is None
        network.start(network.peers[2])
        assert network.server(2).fleet.why_not_ready is not None
        await asyncio.sleep(3 * POLL_S)
        check_alike(network)
        assert network.server(2).host.adapters


@in_virtual_time
async def test_a_late_joiner_gets_all() -> None:
    async with fleet() as network:
        network.kill(network.peers[2])
        for number in (0, 1):
            network.server(number).fleet.excused = {network.peers[2]}
        for name in "abc":
            await network.server(0).change(adapter(name), name.encode())
        await network.server(1).change(update(), b"weights")
        await network.server(1).change({"kind": "pause", "mode": "keep", "clear_cache": False})
        network.start(network.peers[2])
        assert network.server(2).fleet.why_not_ready is not None
        await asyncio.sleep(3 * POLL_S)
        check_alike(network)
        assert set(network.server(2).host.adapters) == {"a", "b", "c"}
        assert network.server(2).host.is_paused


@in_virtual_time
async def test_halves_that_changed_apart_differ_in_labels_until_an_operator_decides() -> None:
    async with fleet() as network:
        await network.server(0).change(update(), b"before")
        network.cut([0], [1, 2])
        await asyncio.sleep(5 * POLL_S)
        for server in network.servers.values():
            assert server.fleet.why_not_ready is None
            await server.fleet.apply(force=True)
        first = await network.server(0).change(update(), b"here")
        second = await network.server(1).change(update(), b"there")
        assert set(first.versions.values()).isdisjoint(second.versions.values())
        network.cuts = set()
        await asyncio.sleep(5 * POLL_S)
        why = network.server(0).fleet.why_not_ready
        assert why is not None
        assert "other changes" in why
        assert network.server(1).fleet.why_not_ready is None
        with pytest.raises(ConflictError, match="fleet apply"):
            await network.server(1).change(adapter(), b"x")
        for server in network.servers.values():
            await server.fleet.apply(force=False)
        await asyncio.sleep(2 * POLL_S)
        check_alike(network)
        assert network.server(0).host.label in second.versions.values()


@in_virtual_time
async def test_engines_that_start_anew_get_all_again() -> None:
    async with fleet() as network:
        await network.server(0).change(adapter(), b"one")
        await network.server(1).change(update(), b"two")
        server = network.server(1)
        server.host.adapters, server.host.weights, server.host.label = {}, {}, "0"
        server.fleet.forget()
        assert server.fleet.why_not_ready is not None
        await asyncio.sleep(3 * POLL_S)
        check_alike(network)
        outcome = await server.change(adapter(), b"three")
        assert set(outcome.versions.values()) == {"3"}


@in_virtual_time
async def test_a_server_that_does_not_list_itself_learns_its_address_from_others() -> None:
    async with fleet() as network:
        server = network.server(0)
        server.fleet.me = None
        server.fleet._listed = lambda: _others(network)
        await asyncio.sleep(3 * POLL_S)
        assert server.fleet.me == network.peers[0]
        await server.change(adapter(), b"one")
        check_alike(network)


async def _others(network: Network) -> list[Peer]:
    return network.peers[1:]


@in_virtual_time
async def test_staged_bytes_are_freed_with_what_replaces_them() -> None:
    async with fleet() as network:
        for number in range(5):
            await network.server(number % 3).change(adapter(), b"x" * 1000 + b"%d" % number)
        for server in network.servers.values():
            assert [len(body) for body in server.member.state.contents.values()] == [1001]
        await network.server(0).change({"kind": "unload_adapter", "name": "a", "model": "m"})
        for server in network.servers.values():
            assert server.member.state.contents == {}


@in_virtual_time
async def test_a_server_that_stopped_half_way_takes_an_earlier_state_too() -> None:
    async with fleet() as network:
        await network.server(0).change(adapter(), b"one")
        server = network.server(2)
        server.member.state.leave(())
        for peer in network.peers[:2]:
            network.kill(peer)
            network.start(peer)
        await asyncio.sleep(5 * POLL_S)
        check_alike(network)
        assert server.host.adapters == {}


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int) -> None:
    run_virtual(history(random.Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 306))
def test_more_random_histories(seed: int) -> None:
    run_virtual(history(random.Random(seed)))


async def history(dice: random.Random) -> None:
    """Let anything happen; in the end all are alike, and no label ever had two contents."""
    async with fleet(dice.choice((2, 3, 4))) as network:
        for _ in range(dice.randrange(10, 40)):
            act(network, dice)
            await asyncio.sleep(dice.choice((0.0, 0.01, 0.5, 3.0, 30.0)))
            await check_ready(network)
            if dice.random() < 0.04:
                await calm(network, dice)
        await calm(network, dice)


async def calm(network: Network, dice: random.Random) -> None:
    """End all faults; each change succeeds then."""
    network.cuts, network.one_way_cuts, network.latency_s = set(), set(), 0.001
    for peer in network.peers:
        if peer not in network.servers:
            network.start(peer)
    for server in network.servers.values():
        server.host.refuses, server.host.delay_s = False, 0.0
    await settle(network)
    ready = [each for each in network.servers.values() if each.fleet.why_not_ready is None]
    assert len({each.member.state.digest for each in ready}) == 1
    for server in list(network.servers.values()):
        await server.fleet.apply(force=False)
    await settle(network)
    check_alike(network)
    for head, content in changes(dice):
        await dice.choice(list(network.servers.values())).change(head, content)
        check_alike(network)


async def check_ready(network: Network) -> None:
    """Check that no two servers that reach the same ones are ready and differ for long."""
    before = differing(network)
    if before:
        await asyncio.sleep(LOOKS_S)
        assert not before & differing(network)


def differing(network: Network) -> set[tuple[Server, str, Server, str]]:
    """Return the pairs of ready servers with different states that reach the same servers."""
    ready = [each for each in network.servers.values() if each.fleet.why_not_ready is None]
    states = {each: each.member.state.digest for each in ready}
    return {
        (first, states[first], second, states[second])
        for first, second in itertools.combinations(ready, 2)
        if states[first] != states[second] and reached(network, first) == reached(network, second)
    }


def reached(network: Network, server: Server) -> Collection[tuple[Peer, bool, bool]]:
    """Return the servers that run, this one too, and whether they reach each other."""
    me, cut = server.peer, network.is_cut
    return {(peer, not cut(me, peer), not cut(peer, me)) for peer in network.servers}


def changes(dice: random.Random) -> Sequence[tuple[Head, bytes | None]]:
    """Return changes of all kinds, in any order."""
    content, mine = b"%d" % dice.randrange(10**9), f"v{dice.randrange(10**9)}"
    models = {"name": "n", "model": "n"}
    heads: list[Head] = [
        adapter(dice.choice("ab")),
        {**adapter(dice.choice("ab")), "version": mine},
        update(*dice.sample("xyz", dice.randrange(1, 4))),
        from_folder(f"folder {dice.randrange(3)}"),
        {"kind": "label_weights", "model": "m", "version": f"{mine}-label"},
        {"kind": "unload_adapter", "name": "a", "model": "m"},
        {"kind": "pause", "mode": "keep", "clear_cache": False},
        {"kind": "resume"},
        {"kind": "sleep", "level": 1, "mode": "keep"},
        {"kind": "wake", "tags": ["weights", "kv_cache"]},
        {"kind": "load_model", **models},
        {"kind": "unload_model", **models},
    ]
    dice.shuffle(heads)
    has_content = {"load_adapter", "update_weights"}
    return [
        (head, content if head["kind"] in has_content and not head.get("folder") else None)
        for head in heads
    ]


def act(network: Network, dice: random.Random) -> None:
    """Do one thing to a fleet."""
    peer = dice.choice(network.peers)
    server = network.servers.get(peer)
    kind = dice.randrange(12)
    if kind < 4:
        disturb(network, dice)
    elif server is None:
        network.start(peer)
    elif kind == 4 and len(network.servers) > 1:
        network.kill(peer)
    else:
        meet(server, dice, kind)


def disturb(network: Network, dice: random.Random) -> None:
    """Do something to the network."""
    match dice.randrange(5):
        case 0:
            numbers = list(range(len(network.peers)))
            dice.shuffle(numbers)
            half = dice.randrange(len(numbers))
            network.cut(numbers[:half], numbers[half:])
            if dice.random() < 0.5:
                for server in network.servers.values():
                    server.run(tried(excuse(server)))
        case 1 | 2:
            network.cuts, network.one_way_cuts = set(), set()
        case 3:
            first, second = dice.sample(network.peers, 2)
            network.one_way_cuts.add((first, second))
        case _:
            network.latency_s = dice.choice((0.001, 0.3, 1.5))


async def excuse(server: Server) -> None:
    """Let a part of a fleet change without the others, once it knows that they are silent."""
    await asyncio.sleep(5 * POLL_S)
    await server.fleet.apply(force=True)


def meet(server: Server, dice: random.Random, kind: int) -> None:
    """Do something to a server, or have it change the fleet."""
    match kind:
        case 5:
            server.host.refuses = dice.random() < 0.5
        case 6:
            server.host.delay_s = dice.choice((0.0, 0.1, 5.0, 70.0))
        case 7 if dice.random() < 0.3:
            server.run(tried(server.fleet.apply(force=dice.random() < 0.5)))
        case 8 if dice.random() < 0.3:
            server.host.forget()
            server.fleet.forget()
        case _:
            server.run(tried(server.change(*changes(dice)[0])))


async def tried(work) -> None:
    with ignoring():
        await work


def test_faults_of_a_look_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with fleet() as network:
            server = network.server(0)
            listed = server.fleet._listed
            server.fleet._listed = _fail
            await asyncio.sleep(30 * POLL_S)
            server.fleet._listed = listed
            await asyncio.sleep(3 * POLL_S)
            await server.change(adapter(), b"one")
            check_alike(network)

    run_virtual(body())
    assert caplog.text.count("cannot be looked at") == 1


async def _fail() -> list[Peer]:
    raise RuntimeError
