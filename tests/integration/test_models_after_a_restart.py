"""A real engine that is started anew while a model is evicted, which returns as it was."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig
from mlx_parallm.demo_models.folders import DEMO_NAME
from mlx_parallm.engine.adapter_commands import ListVersions, UnloadAdapter
from mlx_parallm.engine.commands import EngineCommand, StateJournal
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.parallel.journal import catch_up
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.events import TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow
T = TypeVar("T")
#: MODULE: a layer of the demo model; an adapter of it changes every answer.
MODULE, WIDTHS, RANK = "model.layers.0.mlp.down_proj", (640, 256), 4


class Noted(AsyncEngine):
    """Notes its commands as a fleet of engines does."""

    def __init__(self) -> None:
        super().__init__(
            EngineConfig(
                models=(ModelConfig(served_names=("a",)),),
                cache=CacheConfig(kv_cache_bytes=64 << 20),
                warm_up=False,
            )
        )
        self.journal = StateJournal()

    async def call(self, action: EngineCommand[T]) -> T:
        result = await super().call(action)
        action.noted(self.journal, result)
        return result


def upload(name: str, scale: float) -> AdapterUpload:
    """Return an adapter of the demo model."""
    chance = np.random.default_rng(7)
    shapes = {"lora_a": (WIDTHS[0], RANK), "lora_b": (RANK, WIDTHS[1])}
    tensors = {
        f"{MODULE}.{part}": HostTensor(chance.normal(size=shape).astype(np.float32))
        for part, shape in shapes.items()
    }
    config = {"fine_tune_type": "lora", "lora_parameters": {"scale": scale}}
    return AdapterUpload(name=name, weights=read_adapter(config, tensors, param="adapter"))


async def answer(core: AsyncEngine, adapter: str | None = None) -> tuple[list[int], set[Any]]:
    """Return the tokens of an answer of the model b, and the versions that computed them."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    request = GenerateRequest(
        request_id=f"{adapter} {id(params)}",
        model="b",
        prompt_ids=tuple(range(40, 60)),
        params=params,
        adapter=adapter,
    )
    tokens, versions = list[int](), set[Any]()
    async for event in await core.open_reader(request):
        if isinstance(event, TokenEvent):
            tokens += event.token_ids
            versions.add(event.version)
    return tokens, versions


def listed(infos: list[AdapterInfo]) -> list[tuple[str, str, str, str]]:
    return [(info.model, info.name, info.version, info.digest) for info in infos]


async def test_an_evicted_model_returns_with_its_label_and_adapters() -> None:
    first, anew = Noted(), Noted()
    first.start()
    await first.load_model(ModelLoad(model=DEMO_NAME, names=("b",)))
    plain, _ = await answer(first)
    for name, scale in {"x": 2.0, "y": 1.0}.items():
        await first.control.load_adapter(upload(name, scale), model="b")
    await first.control.set_version("labelled", model="b")
    expected = {name: await answer(first, name) for name in (None, "x")}
    assert expected["x"][0] != plain
    await first.load_model(ModelLoad(model="b", ttl_s=0))
    while "b" in first.journal.models:
        await first.call(ListVersions())
    anew.start()
    for command in catch_up(first.journal):
        await anew.call(command)
    # Both have the same adapters while the model is away, and lose one.
    for core in (first, anew):
        await core.call(UnloadAdapter("y", "b"))
    infos = [(await core.call(ListVersions()))[0] for core in (first, anew)]
    assert listed(list(infos[1])) == listed(list(infos[0]))
    await anew.load_model(ModelLoad(model=DEMO_NAME, names=("b",)))
    for core in (first, anew):
        assert {name: await answer(core, name) for name in (None, "x")} == expected
        core.stop()
