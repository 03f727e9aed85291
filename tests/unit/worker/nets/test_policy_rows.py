"""Rows of policies in batches of any size: their bits on the CPU, and their draws."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.worker.nets.runner import NetRunner
from mlx_parallm.worker.nets.weights import NetWeights
from mlx_parallm.worker.ops import ActRows, NetBatch, NetOutputs
from tests.golden_policies import GoldenPolicy

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="only CPUs have tiles"
)
NUM_ROWS = 150
NAMES = ("ppo_mlp", "a2c_normalized", "maskable_joint", "ppo_bits", "sac", "recurrent")


class Rows:
    """A policy with many rows, of which any may be computed together."""

    def __init__(self, name: str) -> None:
        golden = GoldenPolicy(name)
        self._runner = NetRunner(golden.plan, NetWeights(golden.path, golden.plan))
        draw = np.random.default_rng(2)
        self._chosen = draw.integers(0, len(golden.values["actions"]), NUM_ROWS)
        self._inputs = {key: array[self._chosen] for key, array in golden.inputs.items()}
        for array in self._inputs.values():
            array += draw.uniform(-1, 1, array.shape).astype(array.dtype)
        self._states = {k: array[self._chosen] for k, array in golden.named("states").items()}
        self._starts = golden.values.get("episode_start")
        self._mask = golden.values.get("mask")

    def compute(self, rows: np.ndarray, **more: np.ndarray) -> NetOutputs:
        """Return what an act computes of some rows, every third of them deterministic.

        ``more`` are fields of ``ActRows``.
        """
        chosen = self._chosen[rows]
        act = ActRows(
            seeds=np.stack([np.full(len(rows), 9), rows], axis=1).astype(np.uint32),
            is_deterministic=rows % 3 == 0,
            action_mask=None if self._mask is None else self._mask[chosen],
        )
        act = replace(act, **more)
        batch = NetBatch(
            model="policy",
            inputs={key: array[rows] for key, array in self._inputs.items()},
            states={key: array[rows] for key, array in self._states.items()} or None,
            episode_start=None if self._starts is None else self._starts[chosen],
            act=act,
        )
        return self._runner.run(batch)


@cache
def rows_of(name: str) -> Rows:
    return Rows(name)


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_bits_beside_rows_that_ask_for_more(name: str) -> None:
    policy, rows = rows_of(name), np.arange(NUM_ROWS)
    alone = policy.compute(rows)
    is_judged = rows % 2 == 0
    more = {"actions": np.roll(alone.outputs["actions"], 1, axis=0), "is_judged": is_judged}
    if name == "recurrent":
        more["action_mask"] = np.ones_like(alone.outputs["dist.logits"], bool)
    beside = policy.compute(rows, **more)
    for key, array in alone.outputs.items():
        assert array[~is_judged].tobytes() == beside.outputs[key][~is_judged].tobytes(), key
    assert beside.outputs["actions"][is_judged].tobytes() == more["actions"][is_judged].tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 7, 64, 65])
def test_rows_have_the_same_bits_in_every_batch(name: str, size: int) -> None:
    policy = rows_of(name)
    together = policy.compute(np.arange(NUM_ROWS))
    order = np.random.default_rng(size).permutation(NUM_ROWS)
    for start in range(0, min(NUM_ROWS, 6 * size), size):
        rows = order[start : start + size]
        part = policy.compute(rows)
        for ours, whole in ((part.outputs, together.outputs), (part.states, together.states)):
            for key, array in ours.items():
                assert array.tobytes() == whole[key][rows].tobytes(), key
