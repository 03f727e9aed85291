"""A load is divided among processes without losing or changing anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.bench.http_stream import Target
from mlx_parallm.bench.processes import Load, send_by_processes
from mlx_parallm.bench.record import PlannedRequest
from mlx_parallm.types.errors import ConfigError

TARGET = Target.from_url("http://127.0.0.1:9")


def load_of(num_requests: int, **options: Any) -> Load:
    requests = [
        PlannedRequest(index=index, route="/", body={}, max_tokens=1, arrival_s=index)
        for index in range(num_requests)
    ]
    return Load(target=TARGET, requests=requests, api_key="key", **options)


@given(
    num_requests=st.integers(0, 40),
    concurrency=st.integers(1, 12),
    count=st.integers(1, 12),
    is_open=st.booleans(),
)
def test_shares_have_all_requests_and_clients(
    num_requests: int, concurrency: int, count: int, is_open: bool
) -> None:
    load = load_of(num_requests, concurrency=concurrency, is_open=is_open, ramp_s=2.0)
    if count > concurrency:
        with pytest.raises(ConfigError, match="--processes"):
            load.shares(count)
        return
    shares = load.shares(count)
    assert len(shares) == count
    assert sum(share.concurrency or 0 for share in shares) == concurrency
    indices = [[request.index for request in share.requests] for share in shares]
    assert all(own == sorted(own) for own in indices)
    assert sorted(index for own in indices for index in own) == list(range(num_requests))
    # Each client has as many requests as any other, or one less.
    rounds, clients = -(-num_requests // concurrency), [share.concurrency or 0 for share in shares]
    for own, number in zip(indices, clients, strict=True):
        assert (rounds - 1) * number <= len(own) <= rounds * number
    for share in shares:
        assert (share.target, share.api_key, share.is_open) == (TARGET, "key", is_open)


@given(st.integers(1, 20), st.integers(1, 8))
def test_an_open_loop_without_a_cap_is_divided_by_requests(num_requests: int, count: int) -> None:
    load = load_of(num_requests, is_open=True)
    if count > num_requests:
        with pytest.raises(ConfigError):
            load.shares(count)
        return
    for share in load.shares(count):
        assert share.concurrency is None
        assert abs(len(share.requests) - num_requests / count) < 1


def test_a_process_that_ends_is_an_error() -> None:
    broken: Any = ["no request"]
    load = Load(target=TARGET, requests=broken, concurrency=2)
    with pytest.raises(ConfigError, match="ended before"):
        send_by_processes(load, 2)
