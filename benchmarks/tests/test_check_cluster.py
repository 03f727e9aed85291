"""Comparison of two servers' answers, and commands of mlx.launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cluster_answers import Answers, compare, metrics_of
from benchmarks.launched_world import launch_command


def answers(*samples: tuple[list[int], list[float]]) -> Answers:
    return Answers(samples=list(samples))


def test_numbers_count_up_to_the_first_other_token() -> None:
    same = ([1, 2], [-0.5, -0.25, -3.0])
    # The last number is of the prompt.
    near = ([1, 2], [-0.5, -0.5, -3.5])
    other = ([1, 9], [-0.5, -9.0, -3.0])
    shorter = ([1], [-0.5, -3.0])
    assert compare(answers(same), answers(same)) == (1, 0.0)
    assert compare(answers(same), answers(near)) == (1, 0.5)
    assert compare(answers(same, same), answers(other, shorter)) == (0, 0.0)


def test_answers_of_another_number_of_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare(answers(([1], [0.0])), answers())


def test_metrics_are_those_of_ranks() -> None:
    text = "# HELP mlx_parallm:ranks x\nmlx_parallm:ranks 2.0\nmlx_parallm:other 1.0\n"
    assert metrics_of(text) == {"mlx_parallm:ranks": 2.0}


@pytest.mark.parametrize("wrap", [lambda hosts: hosts, lambda hosts: {"hosts": hosts}])
def test_mlx_launch_is_told_how_many_ranks_a_machine_has(tmp_path: Path, wrap) -> None:
    hosts = [{"ssh": name, "ips": []} for name in ("a", "b", "b", "c")]
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(wrap(hosts)))
    command = launch_command(path, ["python", "-V"])
    assert command[4:] == ["--hostfile", str(path), "-n", "2", "--", "python", "-V"]
