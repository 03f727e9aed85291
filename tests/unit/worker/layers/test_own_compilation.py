"""Layers that compile a step of their own use weights that replaced others."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.worker.weights.loader import run_uncompiled
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build


def decode(model: Any) -> mx.array:
    """Logits of a decode step behind a prompt."""
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    return model(mx.array([[4]]), cache=cache)[0, -1]


@pytest.mark.parametrize("is_uncompiled", [True, False])
def test_weights_that_are_replaced_are_heeded(
    monkeypatch: pytest.MonkeyPatch, is_uncompiled: bool
) -> None:
    # They compile nowhere else.
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    mx.random.seed(0)
    model = build(config_of("kimi_k3"))
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "_decode_core")]
    assert run_uncompiled(model) == len(layers) > 0
    if not is_uncompiled:
        for layer in layers:
            layer._step = None
    decode(model)
    for layer in layers:
        layer.o_proj.weight = 2 * layer.o_proj.weight
    actual = decode(model)
    for layer in layers:
        layer._step = None
    # As long as mlx_lm keeps what it saw first, this is needed.
    assert bool(mx.allclose(actual, decode(model), atol=1e-5)) == is_uncompiled
