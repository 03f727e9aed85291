"""A module with its own attention code runs packed by an override, unless that is wrong."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gemma2

from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.attention_overrides import (
    ATTENTION_OVERRIDES,
    soft_capped_attention,
)
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.path_choice import PathChoice, choose_path
from mlx_parallm.worker.generation.seam import ModelSeams, ModuleSeam
from mlx_parallm.worker.ops import at_once
from tests.integration.test_parity_generate import build_model

BLOCK_SIZE = 4


def choose(model: Any) -> PathChoice:
    return at_once(choose_path)(
        model,
        probe_layout(model),
        ReferenceAttention(BLOCK_SIZE),
        vocab_size=120,
        num_blocks=64,
        block_size=BLOCK_SIZE,
        dtype="float32",
    )


def without_the_cap(step: Any, module: Any, *args: Any, **options: Any) -> mx.array | None:
    cap = module.attn_logit_softcapping
    module.attn_logit_softcapping = None
    try:
        return soft_capped_attention(step, module, *args, **options)
    finally:
        module.attn_logit_softcapping = cap


def test_a_wrong_override_is_refused_and_the_modules_own_code_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = build_model("gemma2")
    ModelSeams(model)
    seam = vars(gemma2.Attention)["__call__"]
    assert isinstance(seam, ModuleSeam)
    monkeypatch.setattr(seam, "override", without_the_cap)
    choice = choose(model)
    refused = choice.attempts[0]
    assert refused.path == "packed"
    assert refused.difference is not None
    assert refused.difference > 0.01
    assert choice.path.name == "split"


def test_the_right_one_is_taken() -> None:
    assert choose(build_model("gemma2")[0]).path.name == "packed"


def test_outside_a_packed_forward_the_stock_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build_model("gemma2")
    tokens = mx.array([[1, 2, 3, 4]])
    ModelSeams(model)
    seam = vars(gemma2.Attention)["__call__"]
    actual = model(tokens)
    monkeypatch.setattr(gemma2.Attention, "__call__", seam.original)
    assert mx.array_equal(actual, model(tokens))


@pytest.mark.parametrize("key", ATTENTION_OVERRIDES)
def test_every_entry_names_a_class_of_mlx_lm(key: tuple[str, str]) -> None:
    name, kind = key
    module = __import__(name, fromlist=[kind])
    assert callable(getattr(module, kind))
