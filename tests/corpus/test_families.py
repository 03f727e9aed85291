"""Tiny decoders of every family that transformers and mlx_lm have, in folders of transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.config import ModelConfig
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.weights.loader import load_model, parameters_of
from mlx_parallm.worker.weights.model_weights import ModelWeights
from scripts.golden_family_cases import FAMILIES
from tests.integration.test_families import DIFFERENT, REFUSED, TOLERANCE

CONFIG = ModelConfig(dtype="float32")
Record = Callable[[str, object], None]


def folder_of(name: str) -> Path:
    return Path(os.environ["CORPUS_WRITTEN"]) / name


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    return np.array(model(mx.array([ids]), cache=make_prompt_cache(model))[0].astype(mx.float32))


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_logits_and_tokens(case: Any, record_property: Record) -> None:
    record_property("case", "logits and greedy tokens")
    folder = folder_of(case.name)
    if case.name in REFUSED:
        record_property("outcome", "refused")
        with pytest.raises(ModelLoadError):
            load_model(CONFIG, folder)
        return
    computed = json.loads((folder / "computed.json").read_text(encoding="utf-8"))
    model = load_model(CONFIG, folder).model
    expected = np.array(computed["logits"])
    apart = np.abs(logits_of(model, computed["ids"])[-len(expected) :] - expected).max()
    if case.name in DIFFERENT:
        record_property("outcome", "differs, with a warning")
        return
    record_property("outcome", "the same")
    assert apart <= TOLERANCE * np.abs(expected).max()
    ids = list(computed["ids"])
    for token in computed["tokens"]:
        assert int(logits_of(model, ids)[-1].argmax()) == token
        ids.append(token)


@pytest.mark.parametrize("name", [case.name for case in FAMILIES if case.name not in REFUSED])
def test_updates_by_names_in_memory(name: str, record_property: Record) -> None:
    record_property("case", "updates by the names in memory")
    record_property("outcome", "the same")
    folder = folder_of(name)
    loaded = load_model(CONFIG, folder)
    expected = parameters_of(loaded.model)
    arrays: Any = mx.load(str(folder / "memory"), format="safetensors")
    sent = {key: to_host(array) for key, array in arrays.items()}
    read_back = ModelWeights(loaded).read_tensors(sent)
    assert read_back.keys() == expected.keys()
    for key in read_back:
        assert mx.allclose(read_back[key], expected[key], rtol=1e-6, atol=1e-6), key
