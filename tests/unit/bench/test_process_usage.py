"""Resources of processes in a run, from the metrics before and after it."""

from __future__ import annotations

from mlx_parallm.bench.process_usage import (
    ProcessCost,
    client_cost,
    format_costs,
    process_costs,
    read_usage,
)


def metrics(**processes: tuple[str, float, float]) -> str:
    """Return metrics of processes by pid: role, processor time and peak memory."""
    lines = ["# TYPE mlx_parallm:process_cpu_seconds_total counter"]
    for pid, (role, cpu_s, peak) in processes.items():
        labels = f'{{pid="{pid}",process="{role}"}}'
        lines += [
            f"mlx_parallm:process_cpu_seconds_total{labels} {cpu_s}",
            f"mlx_parallm:process_peak_memory_bytes{labels} {peak}",
            f"mlx_parallm:process_open_fds{labels} 9.0",
        ]
    return "\n".join(lines)


BEFORE = metrics(p1=("server", 5.0, 100), p2=("http", 1.0, 10), p9=("http", 7.0, 90))
AFTER = metrics(p1=("server", 7.5, 200), p2=("http", 1.5, 20), p3=("http", 0.25, 30))


def test_roles_are_added_up_and_new_processes_count_whole() -> None:
    assert process_costs(read_usage(BEFORE), read_usage(AFTER)) == [
        ProcessCost("server", 2.5, 200),
        ProcessCost("http", 0.75, 50),
    ]


def test_other_servers_tell_nothing() -> None:
    assert process_costs({}, read_usage("process_cpu_seconds_total 3.0\n")) == []


def test_the_client_counts_its_own_time() -> None:
    began = client_cost()
    sum(number * number for number in range(300_000))
    own = client_cost(began.cpu_s)
    assert 0 < own.cpu_s < client_cost().cpu_s
    assert own.peak_bytes > 10 << 20
    assert format_costs([ProcessCost("http", 1.5, 1 << 20)]).startswith("http          1.50 s of")
