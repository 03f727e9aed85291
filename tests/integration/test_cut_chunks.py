"""Modules that keep all scores in memory run on parts of a prompt's chunk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.worker.attention import dense
from mlx_parallm.worker.attention.dense import rows_within
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import max_scores
from mlx_parallm.worker.generation.load.path_choice import choose_path
from mlx_parallm.worker.generation.paths import split
from mlx_parallm.worker.generation.row_groups import RowGroup, make_groups
from mlx_parallm.worker.ops import at_once
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.fake_mac.mac import ALL, FakeMac

# ATTENDING: latent attention, alone, with a selection of keys, and beside states.
ATTENDING = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_linear")
# PACKED: attention that runs packed, alone and beside states.
PACKED = ("deepseek_v2", "qwen3_next", "falcon_h1")
MOST = 60.0


# MANY_LAYERS take longest to build.
MANY_LAYERS = ("falcon_h1", "kimi_linear", "glm4_moe_lite")


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in MANY_LAYERS else name
        for name in ATTENDING + PACKED
    ],
)
def test_parts_of_chunks_equal_the_stock_model(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[RowGroup] = []

    def recorded(*args: Any, **options: Any) -> list[RowGroup]:
        groups = make_groups(*args, **options)
        cut.extend(group for group in groups if group.continues)
        return groups

    monkeypatch.setattr(dense, "MIN_TILE", 3)
    monkeypatch.setattr(split, "make_groups", recorded)
    config = config_of(architecture)
    names: list[str] = []
    for most in (float("inf"), MOST):
        model = build(config)
        choice = at_once(choose_path)(
            model,
            probe_layout(model),
            ReferenceAttention(4),
            vocab_size=config["vocab_size"],
            num_blocks=64,
            block_size=4,
            dtype="float32",
            max_scores=most,
        )
        assert choice.attempts[-1].agrees
        names.append(choice.name)
    assert names[0] == names[1]
    assert bool(cut) == (architecture in ATTENDING)
    assert all(group.length * group.padded_len <= max(MOST, 3 * group.padded_len) for group in cut)


@pytest.mark.parametrize(
    ("architecture", "heads", "rows"), [("deepseek_v3", 128, 30), ("glm4_moe_lite", 20, 194)]
)
def test_a_mac_bounds_the_scores_of_unusual_heads(
    fake_mac: Callable[..., FakeMac], architecture: str, heads: int, rows: int
) -> None:
    config = config_of(architecture)
    layouts = probe_layout(build(config))
    config["num_attention_heads"] = heads
    assert max_scores(layouts, config, mx.bfloat16) == math.inf
    fake_mac(rejects=ALL)
    most = max_scores(layouts, config, mx.bfloat16)
    assert most * heads * 2 == pytest.approx(256e6)
    assert rows_within(32_768, most) == rows
    assert max_scores(layouts, config, mx.bfloat16, 2) == pytest.approx(2 * most)
    assert max_scores((), config, mx.bfloat16) == math.inf
