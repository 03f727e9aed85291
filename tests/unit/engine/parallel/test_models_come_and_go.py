"""Engines in parallel stay alike while models are loaded, changed, evicted and unloaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_parallm.engine.adapter_commands import UnloadAdapter
from mlx_parallm.engine.engine_commands import RelabelWeights
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.loader import ForgetModel, UnloadModel
from mlx_parallm.types.errors import ParallmError
from tests.fleet_harness import FakeFleet
from tests.version_harness import adapter

NUM_HISTORIES = 40


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fleet = FakeFleet(2)
    yield fleet
    fleet.stop()


def update(value: str) -> WeightsUpdate:
    return WeightsUpdate(tensors=cast(Any, {"a": value}))


def own_folder(label: str) -> WeightsUpdate:
    """Return an update to the weights that a model is loaded with."""
    return WeightsUpdate(folder=Path("start"), version=label)


def check_alike(fleet: FakeFleet) -> None:
    fleet.settle()
    first, *others = [life.models for life in fleet.lives]
    assert others == [first] * len(others)


def kill_and_check(fleet: FakeFleet, rank: int) -> None:
    """Start an engine anew, which needs one life for it."""
    before = fleet.lives[rank].num_lives
    fleet.kill(rank)
    check_alike(fleet)
    assert fleet.lives[rank].num_lives == before + 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["n", "m"], ids=["loaded later", "loaded at the start"])
def test_an_evicted_model_returns_as_it_was(fleet: FakeFleet, name: str, rank: int) -> None:
    if name == "n":
        fleet.load("n")
    assert fleet.load_adapter(adapter("x", "digest", "7"), name)
    assert fleet.load_adapter(adapter("y", "other", "8"), name)
    fleet.do(RelabelWeights(name, "labelled"))
    fleet.do(UnloadModel(name))
    listed = [(name, "x", "digest", "7"), (name, "y", "other", "8")]
    assert fleet.lives[rank].models[2] == listed
    kill_and_check(fleet, rank)
    assert fleet.lives[rank].models[2] == listed
    # An adapter can be unloaded while its model is away.
    fleet.do(UnloadAdapter("y", name))
    check_alike(fleet)
    fleet.load(name)
    check_alike(fleet)
    assert fleet.lives[rank].models[1][name] == "labelled"
    assert fleet.lives[rank].models[2] == listed[:1]
    kill_and_check(fleet, 1 - rank)


@pytest.mark.parametrize("name", ["n", "m"], ids=["loaded later", "loaded at the start"])
def test_an_unloaded_model_leaves_nothing(fleet: FakeFleet, name: str) -> None:
    if name == "n":
        fleet.load("n")
    assert fleet.prepare(update("new"), name)
    fleet.commit(name)
    assert fleet.load_adapter(adapter("x", "digest", "7"), name)
    fleet.do(UnloadModel(name))
    fleet.do(ForgetModel(name))
    kill_and_check(fleet, 0)
    # Its name may be given to a model of another folder, whose policies are others.
    assert name not in fleet.lives[0].host.policies
    fleet.load(name)
    check_alike(fleet)
    kill_and_check(fleet, 1)
    weights, labels, adapters = fleet.lives[1].models
    assert weights[name] == {"a": "start", "b": "start"}
    assert (labels[name], adapters) == ("default", [])


class ModelHistory:
    """Random changes of models, and deaths of engines.

    Models with other weights than those of their folder are not evicted.
    """

    def __init__(self, fleet: FakeFleet, seed: int) -> None:
        self._fleet = fleet
        self._chance = random.Random(seed)
        self._changed: set[str] = set()
        self._loaded = {"m"}
        self._adapters: dict[str, str] = {}

    def step(self) -> None:
        """Change a model that is loaded, or bring it back; perhaps an engine dies."""
        name = self._chance.choice("mno")
        if name not in self._loaded:
            self._chance.choice([self._load, self._load, self._forget])(name)
        else:
            changes = [self._update, self._relabel, self._adapt, self._evict, self._evict]
            self._chance.choice([*changes, self._unload])(name)
        if self._chance.random() < 0.3:
            kill_and_check(self._fleet, self._chance.randrange(2))

    def _load(self, name: str) -> None:
        self._fleet.load(name)
        self._loaded.add(name)

    def _update(self, name: str) -> None:
        is_own = self._chance.random() < 0.5
        label = f"update {self._chance.random()}"
        assert self._fleet.prepare(own_folder(label) if is_own else update(label), name)
        self._fleet.commit(name)
        (self._changed.discard if is_own else self._changed.add)(name)

    def _relabel(self, name: str) -> None:
        self._fleet.do(RelabelWeights(name, f"label {self._chance.random()}"))

    def _adapt(self, name: str) -> None:
        short = self._chance.choice("xyz")
        owner = self._adapters.get(short)
        if owner is None:
            digest = f"digest {self._chance.random()}"
            if self._fleet.load_adapter(adapter(short, digest, digest), name):
                self._adapters[short] = name
        else:
            assert not isinstance(self._fleet.call(UnloadAdapter(short, owner)), ParallmError)
            del self._adapters[short]

    def _evict(self, name: str) -> None:
        if name not in self._changed:
            self._fleet.do(UnloadModel(name))
            self._loaded.discard(name)

    def _unload(self, name: str) -> None:
        self._fleet.do(UnloadModel(name))
        self._loaded.discard(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._fleet.do(ForgetModel(name))
        self._changed.discard(name)
        self._adapters = {key: owner for key, owner in self._adapters.items() if owner != name}


def test_engines_stay_alike_whatever_happens_to_models() -> None:
    for seed in range(NUM_HISTORIES):
        fleet = FakeFleet(2)
        try:
            history = ModelHistory(fleet, seed)
            for _ in range(20):
                history.step()
                check_alike(fleet)
        finally:
            fleet.stop()
