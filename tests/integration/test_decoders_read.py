"""Decoders as pooling models, against transformers (scripts/golden_decoder_cases.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.model_task import decoder_plan, decoder_task, has_head
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.types.pooling import PoolingInput, Task
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.pooling.decoder_runner import DecoderRunner
from tests.decoder_folders import decoder_names, read_decoder
from tests.encoder_folders import write_golden

ATOL = 1e-4


def runner_of(folder: Path, golden: dict[str, Any], dtype: str = "auto") -> DecoderRunner:
    config, chosen = golden["config"], tuple(golden.get("chosen", ()))
    plan = decoder_plan("score" if chosen else decoder_task(config, ()), config, chosen)
    assert has_head(config) == (plan.head == "score")
    loaded = open_decoder(ModelConfig(dtype=dtype), write_golden(folder, golden), plan)
    return DecoderRunner(loaded, plan, VectorSpec(poolings=("last",)))


def run(runner: DecoderRunner, golden: dict[str, Any], task: Task) -> list[np.ndarray]:
    return runner.run([PoolingInput(tuple(ids), task) for ids in golden["inputs"]["input_ids"]])


@pytest.fixture(params=decoder_names())
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_decoder(request.param)


def test_hidden_states_and_logits_are_those_of_transformers(
    golden: dict[str, Any], tmp_path: Path
) -> None:
    runner = runner_of(tmp_path, golden)
    actual = run(runner, golden, "token_embed")
    for states, expected in zip(actual, golden["hidden"], strict=True):
        np.testing.assert_allclose(states, np.array(expected), atol=ATOL)
    if golden["logits"] is None:
        assert runner.info.tasks == ("embed", "token_embed")
        return
    logits = run(runner, golden, runner.info.tasks[0])
    for states, expected in zip(logits, golden["logits"], strict=True):
        np.testing.assert_allclose(states, np.array(expected), atol=ATOL)


def test_a_ragged_batch_equals_each_input_alone(golden: dict[str, Any], tmp_path: Path) -> None:
    runner = runner_of(tmp_path, golden)
    for task in runner.info.tasks:
        together = run(runner, golden, task)
        for ids, result in zip(golden["inputs"]["input_ids"], together, strict=True):
            (alone,) = runner.run([PoolingInput(tuple(ids), task)])
            np.testing.assert_allclose(alone, result, atol=ATOL)
