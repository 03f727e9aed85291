"""Servers that tests share stay as the tests found them, even when one fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.forking_parent import forked_engines
from tests.server_process import ServerProcess
from tests.server_state import ServerState, put_back, state_of

#: What servers had once the fixtures that tests share were made, by the ids of these fixtures.
STATES = pytest.StashKey[dict[frozenset[int], dict[ServerProcess, ServerState]]]()
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a failure of a test, or of its fixtures."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="module", autouse=True)
def _engines_of_this_process_are_forked() -> Iterator[None]:
    """Fork the engines of ``LLM``: see README.md."""
    with forked_engines():
        yield


@pytest.fixture(autouse=True)
def _servers_stay_as_they_were(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put shared servers back after a test that failed.

    It is made after the fixtures that several tests share, and before a test's own, which it
    outlives. Nothing is asked of a server but before the first of the tests with the same fixtures.
    """
    shared = request.node.funcargs.values()
    servers = [value for value in shared if isinstance(value, ServerProcess)]
    states = request.config.stash.setdefault(STATES, {})
    key = frozenset(map(id, shared))
    if servers and key not in states:
        states[key] = {server: state_of(server) for server in servers}
    yield
    if request.node.stash.get(FAILED, False):
        for server in servers:
            put_back(server, states[key][server])
