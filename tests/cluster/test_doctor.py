"""``doctor`` on two ranks: rank 0 reports on both, and on the links between them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.serving.local_ranks import ring_ranks

pytestmark = pytest.mark.slow

# LIMIT_S ends ranks that wait for each other for ever.
LIMIT_S = 150
OTHER_SETTING = {"MLX_PARALLM_MAX_NUM_SEQS": "3"}


def test_doctor_measures_links_and_names_what_differs(tmp_path: Path) -> None:
    ranks = [
        ChildProcess(
            ["mlx_parallm", "doctor", "--json"],
            env={**os.environ, **variables, **different},
            stdout=subprocess.PIPE,
            text=True,
        )
        for variables, different in zip(ring_ranks(2, tmp_path), ({}, OTHER_SETTING), strict=True)
    ]
    try:
        texts = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert texts[1] == ""
    # A server with these ranks would be refused.
    assert [rank.returncode for rank in ranks] == [1, 0]
    report = json.loads(texts[0])
    world = report["world"]
    assert "setting.scheduler.max_num_seqs is 3" in world["difference"]
    assert (world["backend"], len(world["ranks"])) == ("ring", 2)
    figures = (world["log_us"], world["sums"]["small_us"], world["sums"]["large_gb_per_s"])
    assert min(figures) > 0
    # No rank loads a whole model.
    assert (report["kv"], report["kv_problem"]) == ({}, None)
