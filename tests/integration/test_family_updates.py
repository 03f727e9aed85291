"""Weights are updated by the names of a folder, and by those that transformers has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.config import ModelConfig
from mlx_parallm.worker.weights.loader import LoadedModel, load_model, parameters_of
from mlx_parallm.worker.weights.model_weights import ModelWeights
from tests.encoder_folders import golden_arrays, write_golden
from tests.golden_weights import weighted_sum
from tests.integration.test_families import NAMES, REFUSED, read_family

UPDATED = [name for name in NAMES if name not in REFUSED]
IN_MEMORY = [name for name in UPDATED if "memory" in read_family(name)]


def load(folder: Path, golden: dict[str, Any]) -> LoadedModel:
    return load_model(ModelConfig(dtype="float32"), write_golden(folder, golden))


def assert_equal(read_back: Any, expected: dict[str, mx.array]) -> None:
    assert read_back.keys() <= expected.keys()
    for name in read_back:
        assert mx.array_equal(read_back[name], expected[name]), name


def sources(saved: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what arrays in memory may be made of: one of a folder's, or several in one.

    Experts of a layer are one array, with gates before what they gate; so are the convolutions of
    queries, keys and values.
    """
    groups: dict[str, list[np.ndarray]] = {}
    for name in sorted(saved):
        prefix, is_expert, rest = name.partition(".experts.")
        if is_expert and rest[0].isdigit():
            groups.setdefault(f"{prefix}.{rest.partition('.')[2]}", []).append(saved[name])
    stacked = {name: np.stack(arrays) for name, arrays in groups.items()}
    pairs = [("gate_proj", "up_proj"), ("w1", "w3")]
    joined = [
        np.concatenate([stacked[name], stacked[name.replace(gate, up)]], axis=1)
        for name in stacked
        for gate, up in pairs
        if f".{gate}." in name
    ]
    convolutions = [
        np.concatenate([saved[name.replace(".q_", f".{part}_")] for part in "qkv"])
        for name in saved
        if name.endswith(".q_conv1d.weight")
    ]
    # The weights that a folder has of all experts are those of memory.
    return [*saved.values(), *stacked.values(), *joined, *convolutions]


def in_memory(golden: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return all parameters as transformers has them in memory."""
    saved = {name: np.array(array) for name, array in golden_arrays(golden).items()}
    known = {weighted_sum(each): each for each in sources(saved)}
    made = {name: known[total].reshape(shape) for name, (shape, total) in golden["memory"].items()}
    return made | {name: saved[name] for name in saved if name not in golden["only_saved"]}


@pytest.mark.parametrize("name", UPDATED)
def test_a_folder_and_its_tensors_are_read(name: str, tmp_path: Path) -> None:
    golden = read_family(name)
    loaded = load(tmp_path, golden)
    weights, expected = ModelWeights(loaded), parameters_of(loaded.model)
    folder = weights.read_folder(tmp_path)
    assert folder.keys() == expected.keys()
    assert_equal(folder, expected)
    sent = {key: to_host(array) for key, array in golden_arrays(golden).items()}
    assert_equal(weights.read_tensors(sent), expected)
    # Some classes count norms from 1, and know that by weights of other kinds.
    norms = {key for key in sent if "norm" in key}
    for names in (norms, sent.keys() - norms):
        if names:
            read_back = weights.read_tensors({key: sent[key] for key in names})
            assert read_back
            assert_equal(read_back, expected)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_tensors_in_memory_are_read(name: str, tmp_path: Path) -> None:
    golden = read_family(name)
    loaded = load(tmp_path, golden)
    expected = parameters_of(loaded.model)
    sent = {key: to_host(mx.array(array)) for key, array in in_memory(golden).items()}
    read_back = ModelWeights(loaded).read_tensors(sent)
    assert read_back.keys() == expected.keys()
    assert_equal(read_back, expected)
