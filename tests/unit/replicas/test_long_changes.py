"""Changes that end with requests keep no other change from coming."""

from __future__ import annotations

import asyncio

import pytest

from mlx_parallm.replicas.entries import DECIDED_FIRST, Head
from mlx_parallm.replicas.fleet import POLL_S
from tests.replica_fleet import Network, adapter
from tests.virtual_time import in_virtual_time, run_virtual

UNLOAD: Head = {"kind": "unload_model", "name": "n"}
PAUSE: Head = {"kind": "pause", "mode": "wait", "clear_cache": False}


@pytest.mark.parametrize("head", [UNLOAD, PAUSE])
@pytest.mark.parametrize("number", [0, 1])
def test_the_next_change_does_not_wait_for_requests(head: Head, number: int) -> None:
    run_virtual(change_twice(head, number))


async def change_twice(head: Head, number: int) -> None:
    """Change a fleet once more while a change ends with requests at one server."""
    assert head["kind"] in DECIDED_FIRST
    network = Network(2)
    await asyncio.sleep(2 * POLL_S)
    ends = network.server(number).host.requests_end = asyncio.Event()
    first = network.server(0).run(network.server(0).change(head))
    await asyncio.sleep(POLL_S)
    outcome = await network.server(1).change(adapter(), b"tensors")
    assert set(outcome.versions) == set(map(str, network.peers))
    assert not first.done()
    ends.set()
    await first
    network.close()


@in_virtual_time
async def test_a_server_that_comes_late_does_not_wait_for_the_requests_of_an_unloaded_model() -> (
    None
):
    network = Network(2)
    await asyncio.sleep(2 * POLL_S)
    await network.server(0).change(UNLOAD)
    network.kill(network.peers[1])
    network.start(network.peers[1])
    network.server(1).host.requests_end = asyncio.Event()
    await asyncio.sleep(5 * POLL_S)
    assert network.server(1).fleet.why_not_ready is None
    network.close()
