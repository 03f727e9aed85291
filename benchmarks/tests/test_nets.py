"""The parts of the benchmark of nets that need no server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.make_net import ACTIONS, CHANNELS, SIDE, make_cnn
from benchmarks.nets import Medians, in_turns
from benchmarks.raw_clients import json_post
from mlx_parallm.models.nets.plan import read_net


def test_the_cnn_is_a_policy_for_images(tmp_path: Path) -> None:
    signature = read_net(make_cnn(tmp_path / "cnn")).signature
    assert [spec.shape for spec in signature.inputs] == [(-1, CHANNELS, SIDE, SIDE)]
    assert [spec.shape for spec in signature.outputs] == [(-1, ACTIONS), (-1, 1)]
    assert signature.policy is not None


def test_all_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def turn(name: str) -> dict[str, float]:
        order.append(name)
        return {"us": float(len(order))}

    rounds = in_turns({"a": lambda: turn("a"), "b": lambda: turn("b")}, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert rounds == [{"a: us": 4.0, "b: us": 3.0}, {"a: us": 5.0, "b: us": 6.0}]


def test_ratios_are_those_of_rounds() -> None:
    medians = Medians([{"x": 1, "y": 10}, {"x": 30, "y": 10}, {"x": 4, "y": 2}])
    assert medians.of("x") == 4
    assert medians.ratio("x", "y") == pytest.approx(2)


def test_a_request_says_how_long_its_body_is() -> None:
    head, _, body = json_post("/v1/rl/act", {"observations": [[0.5]]}).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
