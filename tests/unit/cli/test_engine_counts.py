"""`mlx_parallm doctor --engines`: which numbers of engines are measured, and which is advised."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mlx_parallm.cli import engine_counts
from mlx_parallm.cli.engine_counts import (
    EngineAdvice,
    EngineCount,
    candidates,
    flags_of,
    recommended,
    render,
    rows_while_faster,
    with_count,
)
from mlx_parallm.config import EngineConfig
from mlx_parallm.server_config import ServerConfig
from tests.fake_mac.mac import FakeMac


def rows_of(*rates: float) -> list[EngineCount]:
    """Return measurements of 1, 2, 4, … engines."""
    return [EngineCount(engines=1 << i, tokens_per_s=rate) for i, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "system", "expected"),
    [
        (0, 1, "linux", [1]),
        (0, 2, "linux", [1, 2]),
        (0, 6, "linux", [1, 2, 4, 6]),
        (0, 8, "linux", [1, 2, 4, 8]),
        (0, 12, "darwin", [1, 2]),
        (1, 16, "linux", [1, 2]),
        (4, 64, "linux", [1, 2, 4]),
    ],
)
def test_numbers_double_up_to_the_gpus_or_cores(
    num_gpus: int, num_cores: int, system: str, expected: list[int]
) -> None:
    assert candidates(num_gpus, num_cores, system) == expected


def test_engines_share_gpus_only_where_there_are_fewer() -> None:
    base = ServerConfig()
    assert flags_of(with_count(base, 2, 0)) == "--data-parallel-size 2"
    assert flags_of(with_count(base, 2, 4)) == "--data-parallel-size 2"
    assert flags_of(with_count(base, 2, 1)) == "--data-parallel-size 2 --data-parallel-devices 0 0"


def test_engines_of_other_machines_are_not_measured() -> None:
    base = ServerConfig(engines=("10.0.0.2:7000",), data_parallel_size=2)
    assert with_count(base, 2, 0).engines == ()


@pytest.mark.parametrize(
    ("rates", "num_measured", "best"),
    [
        ((100, 150, 151, 400), 3, 2),
        ((100, 109, 400), 2, 1),
        ((100, 120, 144), 3, 4),
        ((100, 80), 2, 1),
    ],
)
def test_more_engines_are_measured_while_they_pay(
    rates: tuple[float, ...], num_measured: int, best: int
) -> None:
    known = {row.engines: row for row in rows_of(*rates)}
    rows = list(rows_while_faster(sorted(known), known.__getitem__))
    assert len(rows) == num_measured
    assert recommended(rows) == best


def test_engines_that_do_not_fit_end_the_table() -> None:
    rows = [*rows_of(1000.0), EngineCount(engines=2, problem="No room.")]
    known = {row.engines: row for row in rows}
    assert list(rows_while_faster([1, 2, 4], known.__getitem__)) == rows
    advice = EngineAdvice(
        model="m", streams=32, tokens=64, rows=tuple(rows), recommended=1, flags="--x 1"
    )
    *_, first, second, empty, last = render(advice)
    assert first.split()[:3] == ["1", "1,000", "1.00"]
    assert (second.split(maxsplit=1), empty, last) == (["2", "No room."], "", "recommended: --x 1")


def test_nothing_is_recommended_where_no_engine_starts() -> None:
    rows = [EngineCount(engines=1, problem="No room.")]
    assert recommended(rows) is None
    advice = EngineAdvice(
        model="m", streams=32, tokens=64, rows=tuple(rows), recommended=None, flags=""
    )
    assert render(advice)[-1] == "recommended: none: no engine could be started"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_mac_is_warned_of_several_engines(
    fake_mac: Callable[..., FakeMac],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    def measured(_engine_config: EngineConfig, server_config: ServerConfig) -> EngineCount:
        count = server_config.data_parallel_size
        return EngineCount(engines=count, tokens_per_s=100.0 * count)

    monkeypatch.setattr(engine_counts, "measured", measured)
    for is_mac in (False, True):
        if is_mac:
            fake_mac()
        assert engine_counts.run(EngineConfig(), ServerConfig(), as_json=as_json) == 0
        printed = capsys.readouterr()
        assert ("crash" in printed.out) == is_mac
        assert ("crash" in printed.err) == (is_mac and not as_json)
        if as_json:
            assert (json.loads(printed.out)["warning"] is not None) == is_mac
