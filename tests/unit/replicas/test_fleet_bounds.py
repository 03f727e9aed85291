"""A server that does not end its part of a change keeps a fleet from changing for a time only."""

from __future__ import annotations

import asyncio

import pytest

from mlx_parallm.replicas import fan_out
from mlx_parallm.replicas.member import STAGE_S
from mlx_parallm.types.errors import PeerSilentError
from tests.replica_fleet import adapter, update
from tests.unit.replicas.test_fleet import check_alike, fleet
from tests.virtual_time import in_virtual_time

FOR_EVER_S = 1e6
SHORT_S = 100.0


@pytest.fixture(autouse=True)
def step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "STEP_S", SHORT_S)


@in_virtual_time
async def test_a_peer_that_never_ends_a_stage_is_named_and_holds_nothing() -> None:
    async with fleet() as network:
        network.server(2).host.delay_s = FOR_EVER_S
        with pytest.raises(PeerSilentError, match=r"10\.0\.0\.3.*answers, and has not"):
            await network.server(0).change(update(), b"one")
        network.server(2).host.delay_s = 0.0
        await network.server(1).change(update(), b"two")
        check_alike(network)


@in_virtual_time
async def test_the_bound_grows_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "BYTES_PER_S", 0.01)
    async with fleet() as network:
        network.server(2).host.delay_s = SHORT_S + 50
        outcome = await network.server(0).change(update(), b"x")
        assert outcome.versions[str(network.peers[0])] == "1"
        await asyncio.sleep(SHORT_S)
        check_alike(network)


@in_virtual_time
async def test_a_peer_that_never_ends_a_commit_does_not_keep_the_others() -> None:
    async with fleet() as network:
        network.server(0).host.delay_s = 0.4
        change = network.server(0).run(network.server(0).change(adapter(), b"one"))
        # All have staged it after the questions and the reservation, and commit it for a while.
        await asyncio.sleep(0.5)
        network.server(2).host.delay_s = FOR_EVER_S
        outcome = await change
        assert outcome.versions[str(network.peers[2])] is None
        assert network.server(1).host.adapters


@in_virtual_time
async def test_a_change_expires_while_it_is_being_staged() -> None:
    async with fleet() as network:
        network.server(2).host.delay_s = FOR_EVER_S
        network.server(1).run(network.server(1).change(adapter(), b"one"))
        await asyncio.sleep(2.0)
        assert all(server.member.staged for server in network.servers.values())
        network.kill(network.peers[1])
        await asyncio.sleep(STAGE_S - 5)
        # A coordinator that was killed drops nothing.
        assert all(server.member.staged for server in network.servers.values())
        await asyncio.sleep(10)
        network.start(network.peers[1])
        network.server(2).host.delay_s = 0.0
        await asyncio.sleep(3.0)
        check_alike(network)
        await network.server(1).change(adapter(), b"two")
        check_alike(network)
