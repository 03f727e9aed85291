"""Ranks that are started here read their place from their variables."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.serving.launched import Launched, launched_in
from mlx_parallm.serving.local_ranks import nccl_ranks, ring_ranks


def test_ranks_of_a_ring_know_each_other(tmp_path: Path) -> None:
    variables = ring_ranks(3, tmp_path)
    assert [launched_in(each) for each in variables] == [
        Launched(rank, 3, "ring") for rank in range(3)
    ]


def test_each_rank_over_nccl_sees_its_own_gpu() -> None:
    variables = nccl_ranks(["2", "5"])
    assert [launched_in(each) for each in variables] == [
        Launched(0, 2, "nccl"),
        Launched(1, 2, "nccl"),
    ]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in variables] == ["2", "5"]
