"""Two servers, and balancers before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.scaleout.balancers import BALANCERS, KEY, Balancer, balancing
from tests.server_process import ServerProcess

MODELS = ("mlx-parallm-demo", "demo:embed")


@contextmanager
def two_servers(*flags: str) -> Iterator[list[ServerProcess]]:
    """Yield two servers of the embedded models."""
    servers = [ServerProcess("--api-key", KEY, "--model", *MODELS, *flags) for _ in range(2)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def addresses(servers: list[ServerProcess]) -> list[str]:
    """Return ``host:port`` of each."""
    return [f"127.0.0.1:{server.port}" for server in servers]


@pytest.fixture(scope="session")
def servers() -> Iterator[list[ServerProcess]]:
    """Yield two servers that all balancers share."""
    with two_servers() as started:
        yield started


@pytest.fixture(scope="module", params=BALANCERS, ids=lambda each: each.name)
def balancer(request: pytest.FixtureRequest) -> Balancer:
    """Return each balancer that is installed."""
    chosen: Balancer = request.param
    if not chosen.is_installed:
        pytest.skip(f"{chosen.program} is not installed; see docs/scale-out.md")
    return chosen


@pytest.fixture(scope="module")
def url(balancer: Balancer, servers: list[ServerProcess]) -> Iterator[str]:
    """Yield the address of a balancer before the shared servers."""
    with balancing(balancer, addresses(servers)) as address:
        yield address
