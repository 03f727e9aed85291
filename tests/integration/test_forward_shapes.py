"""Batches padded to buckets, as on CUDA, against batches that are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.pooling import forward_shapes
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from tests.encoder_folders import golden_names, read_golden, write_golden

POOLINGS = ("cls", "mean", "max", "weightedmean", "last")
# Sums of other shapes round differently.
ATOL = 1e-4


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(forward_shapes, "backend_name", lambda: "cuda")
    return monkeypatch


@pytest.mark.parametrize("name", golden_names())
def test_results_are_the_same(name: str, tmp_path: Path, few_shapes: pytest.MonkeyPatch) -> None:
    golden = read_golden(name)
    folder = write_golden(tmp_path, golden)
    padded = EncoderRunner(load_encoder(folder), VectorSpec(poolings=POOLINGS))
    assert forward_shapes.ForwardShapes.of_device(9).are_few
    few_shapes.undo()
    exact = EncoderRunner(load_encoder(folder), VectorSpec(poolings=POOLINGS))
    # Three texts between the buckets' lengths take a forward of four rows.
    lengths = [5, 9, 3] if padded.info.max_model_len >= 9 else [5, 6, 3]
    texts = [tuple(range(7, 7 + length)) for length in lengths]
    for task in padded.info.tasks:
        places = (1, 2) if task.startswith("mlm") else ()
        top_k = 3 if task == "mlm_top" else 0
        inputs = [PoolingInput(text, task, places=places, top_k=top_k) for text in texts]
        for result, expected in zip(padded.run(inputs), exact.run(inputs), strict=True):
            assert np.isfinite(expected).all()
            np.testing.assert_allclose(result, expected, atol=ATOL)
