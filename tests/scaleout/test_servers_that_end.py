"""A server behind a balancer that is killed, and one that is stopped, under load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Semaphore

import pytest

from tests.scaleout.balancers import ROUTER, Balancer, balancing
from tests.scaleout.conftest import addresses, two_servers
from tests.scaleout.requests import DONE, LOST, complete, ended_by, stream
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

STREAMS, LATER = 32, 60
#: More than two checks of HAProxy and of the router.
DELAY = ("--shutdown-delay", "5")


@contextmanager
def streams_through(
    balancer: Balancer, url: str, num_streams: int, max_tokens: int
) -> Iterator[list[Future[str]]]:
    """Yield streams, each of a session of its own, once all have begun."""
    begun = Semaphore(0)
    with ThreadPoolExecutor(num_streams) as pool:
        sessions = [(balancer.session_header, f"stream-{number}") for number in range(num_streams)]
        streams = [pool.submit(stream, url, each, max_tokens, begun) for each in sessions]
        for _ in streams:
            begun.acquire()
        yield streams


def test_kill_ends_only_the_streams_of_its_server(balancer: Balancer) -> None:
    with two_servers() as servers, balancing(balancer, addresses(servers)) as url:
        with streams_through(balancer, url, STREAMS, 300) as streams:
            num_lost = servers[0].metric("vllm:num_requests_running")
            kill(servers[0])
            sessions = [(balancer.session_header, f"later-{number}") for number in range(LATER)]
            later = Counter(complete(url, session) for session in sessions)
        assert 0 < num_lost < STREAMS
        ends = Counter(each.result() for each in streams)
        assert ends == {LOST: num_lost, DONE: STREAMS - num_lost}
        assert later[200] >= LATER - (2 if balancer == ROUTER else 0)


def test_a_request_that_was_begun_is_not_repeated(balancer: Balancer) -> None:
    if balancer == ROUTER:
        pytest.skip("the router repeats requests, unless a session's server stays dead")
    with two_servers() as servers, balancing(balancer, addresses(servers)) as url:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, url, (balancer.session_header, "begun"), 300)
            while not (busy := [each for each in servers if is_busy(each)]):
                assert not answer.done()
            (other,) = (each for each in servers if each not in busy)
            before = ended_by(other).total()
            kill(busy[0])
            assert answer.result() == 502
        assert ended_by(other).total() == before


def test_stop_loses_nothing(balancer: Balancer) -> None:
    with two_servers(*DELAY) as servers, balancing(balancer, addresses(servers)) as url:
        with streams_through(balancer, url, 8, 200) as streams, ThreadPoolExecutor(4) as pool:
            servers[0].process.terminate()
            loads = [pool.submit(load, balancer, url, servers[0], name) for name in "abcd"]
            statuses = sum((each.result() for each in loads), Counter[int]())
        assert servers[0].process.wait() == 0
        assert {each.result() for each in streams} == {DONE}
        assert set(statuses) == {200}


def load(balancer: Balancer, url: str, server: ServerProcess, name: str) -> Counter[int]:
    """Return the statuses of short requests, each of another session, until a server has ended."""
    statuses: Counter[int] = Counter()
    while server.process.poll() is None:
        session = (balancer.session_header, f"{name}-{statuses.total()}")
        statuses[complete(url, session, 2)] += 1
    return statuses


def kill(server: ServerProcess) -> None:
    """End a server as a crash does."""
    server.process.kill()
    server.process.wait()


def is_busy(server: ServerProcess) -> bool:
    """True if a server runs a sequence."""
    return server.metric("vllm:num_requests_running") > 0
