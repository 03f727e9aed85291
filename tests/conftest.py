"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.server_process import ServerProcess

# Its tests need clients that this environment does not have: make conformance.
collect_ignore = ["conformance"]

# How long an example takes says nothing on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def live_server() -> Iterator[ServerProcess]:
    """`mlx_parallm serve` with the embedded model, in a process of its own."""
    server = ServerProcess("--max-num-seqs", "32", "--max-model-len", "2048")
    server.wait_until_ready()
    yield server
    server.stop()
