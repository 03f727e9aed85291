"""Sessions are bounded in number and bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlx_parallm.training.records import Status
from mlx_parallm.training.session_files import encoded
from mlx_parallm.training.session_store import SessionLimits
from mlx_parallm.types.errors import ConflictError, InvalidRequestError
from tests.unit.training.worker_sessions import EXAMPLES, Open, begin


async def test_sessions_and_their_logs_are_bounded(opened: Open) -> None:
    num_bytes = len(encoded(EXAMPLES)) + 300
    service = opened(SessionLimits(max_sessions=2, max_session_bytes=num_bytes))
    session = await begin(service)
    await begin(service)
    with pytest.raises(ConflictError, match="2 training sessions"):
        await begin(service)
    with pytest.raises(ConflictError, match=r"full.*--max-data-bytes"):
        await service.step(session.config.id, 5, None)
    assert 1 <= session.num_steps < 5
    assert session.state.status is Status.PAUSED


async def test_data_that_no_session_may_have_is_refused(opened: Open, tmp_path: Path) -> None:
    service = opened(SessionLimits(max_session_bytes=len(encoded(EXAMPLES))))
    with pytest.raises(
        InvalidRequestError, match=r"a session may have.*--max-data-bytes"
    ) as refusal:
        await begin(service)
    assert refusal.value.param == "data"
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_all_sessions_together_are_bounded(opened: Open) -> None:
    num_bytes = len(encoded(EXAMPLES))
    service = opened(SessionLimits(max_bytes=2 * num_bytes + 300))
    first, second = await begin(service), await begin(service)
    with pytest.raises(ConflictError, match="--max-data-bytes"):
        await begin(service)
    service.run(first.config.id, 100)
    [_ async for _ in service.follow(first.config.id, 0)]
    assert 1 <= first.num_steps < 100
    assert "--max-data-bytes" in (first.state.reason or "")
    await service.delete(second.config.id)
    service.resume(first.config.id)
    await first.wait_for_steps(first.num_steps)


async def test_many_sessions_are_refused_before_anything_is_kept(
    opened: Open, tmp_path: Path
) -> None:
    service = opened(SessionLimits(max_sessions=3))
    refused = 0
    for _ in range(1_000):
        try:
            await begin(service)
        except ConflictError:
            refused += 1
    assert (len(service.all()), refused) == (3, 997)
    assert len(list((tmp_path / "sessions").glob("mezo_*"))) == 3


async def test_sessions_that_are_created_at_once_are_bounded(opened: Open) -> None:
    service = opened(SessionLimits(max_sessions=2))
    made = await asyncio.gather(*(begin(service) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(each, ConflictError) for each in made) == 3
    assert len(service.all()) == 2
