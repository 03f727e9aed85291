"""A commit of new weights that lacks memory half way: the old weights stay."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.worker.generation.live_model import LiveModel
from mlx_parallm.worker.weights.loader import load_model
from mlx_parallm.worker.weights.model_weights import ModelWeights

NORM = "model.norm.weight"


class Adapters:
    """Adapters with gains that depend on the weights. Stands for ``AdapterStore``."""

    def __init__(self) -> None:
        self.fails = True
        self.num_released = 0

    def refresh(self) -> None:
        if self.fails:
            raise MemoryError

    def release(self) -> None:
        self.num_released += 1


class Path:
    """Stands for ``ForwardPath``."""

    def __init__(self) -> None:
        self.num_forgotten = 0

    def forget_weights(self) -> None:
        self.num_forgotten += 1


def test_a_commit_that_fails_puts_the_old_weights_back() -> None:
    loaded = load_model(ModelConfig(path=str(DEMO_FOLDER), dtype="float32"), DEMO_FOLDER)
    weights = ModelWeights(loaded)
    adapters: Any = Adapters()
    path: Any = Path()
    live = LiveModel(weights, path, adapters, None)
    before, used = live.checksums(), mx.get_active_memory()
    size = loaded.model.model.norm.weight.size
    update = {NORM: HostTensor(np.full(size, 2, np.float32))}
    live.prepare_tensors(update)
    with pytest.raises(MemoryError):
        live.commit()
    assert live.checksums() == before
    assert mx.get_active_memory() == used
    # Slots may have gains of both weights, and what was compiled may hold the new ones.
    assert (adapters.num_released, path.num_forgotten) == (1, 2)
    assert weights.path == DEMO_FOLDER
    adapters.fails = False
    live.prepare_tensors(update)
    live.commit()
    assert live.checksums()[NORM] != before[NORM]
