"""Weights replaced while requests run, and memory freed and allocated again."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import AdapterConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.engine.control import PauseMode, Watcher
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.machine import user_cache
from mlx_parallm.models.checkpoints.contents import DigestMemory, FolderContents
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.build import build_engines
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.content import kv_content
from mlx_parallm.types.errors import InvalidRequestError, VersionMismatchError
from mlx_parallm.types.request import DEFAULT_VERSION
from mlx_parallm.worker.ops import Load, Op
from mlx_parallm.worker.worker import Worker
from tests.engine_action import Do
from tests.integration.test_live_adapters import Sample, begin, generate, is_same

NAME = "model"
CHANGED = "model.layers.0.self_attn.o_proj.weight"
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def save(folder: Path, scale: float) -> Path:
    """Write the embedded model in float32 with one tensor scaled; return the folder."""
    folder.mkdir()
    model, _ = load_model(DEMO_FOLDER)
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    named: Any = tree_flatten(dequantize_model(model).parameters())
    tensors = {name: value.astype(mx.float32) for name, value in named}
    tensors[CHANGED] = tensors[CHANGED] * scale
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    for name in FILES:
        (folder / name).write_bytes((DEMO_FOLDER / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {scale: save(root / str(scale), scale) for scale in (1.0, 0.5)}


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DigestMemory]:
    """Return the engine's memory of digests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # The digests of files as young as these would not be remembered.
        yield DigestMemory(user_cache(os.environ), lambda: time.time_ns() + 60 * 10**9)


@pytest.fixture(scope="module")
def started(folders: dict[float, Path], memory: DigestMemory) -> Iterator[AsyncEngine]:
    root = folders[1.0].parent
    engine = AsyncEngine(
        EngineConfig(
            models=(ModelConfig(path=str(folders[1.0]), served_names=(NAME,)),),
            scheduler=SchedulerConfig(max_num_seqs=8),
            adapters=AdapterConfig(allowed_roots=(str(root),)),
        )
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
async def engine(started: AsyncEngine, folders: dict[float, Path]) -> AsyncEngine:
    """Return an engine with the first weights."""
    await started.control.update_weights_from_folder(str(folders[1.0]), version=DEFAULT_VERSION)
    return started


async def test_a_lasting_content_is_of_weights_and_of_all_else_that_decides(
    engine: AsyncEngine, folders: dict[float, Path]
) -> None:
    def lasting(loop: EngineLoop) -> tuple[str | None, str | None]:
        live = loop.engines[NAME].live
        assert live is not None
        live.contents.join()
        return live.policies.weights_of(None).lasting_content, live.policies.base.lasting.digest

    first, base = await engine.call(Do(lasting))
    identity = await engine.call(Do(lambda loop: loop.engines[NAME].policies.base.identity))
    assert base is not None
    assert first == kv_content(identity, base, "")
    await engine.control.update_weights_from_folder(str(folders[0.5]))
    assert (await engine.call(Do(lasting)))[0] not in (None, first)
    await engine.control.update_weights_from_folder(str(folders[1.0]))
    assert (await engine.call(Do(lasting)))[0] == first
    tensors = {CHANGED: HostTensor(tensor_of(folders[0.5], CHANGED))}
    await engine.control.update_weights(WeightsUpdate(tensors=tensors))
    assert await engine.call(Do(lasting)) == (None, None)


class Rewriting(Worker):
    """Loads a model whose weights are written again while they are read."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def begin(self, op: Op[Any]) -> Any:
        if isinstance(op, Load):
            self.file.touch()
        return super().begin(op)


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_a_folder_that_changes_while_it_is_loaded_has_no_content(
    folders: dict[float, Path], memory: DigestMemory, tmp_path: Path, is_rewritten: bool
) -> None:
    folder = shutil.copytree(folders[1.0], tmp_path / NAME)
    finder = FolderContents(memory)
    finder.hash(finder.see(folder))
    finder.join()
    worker = Rewriting(folder / "model.safetensors" if is_rewritten else tmp_path / "other")
    config = EngineConfig(models=(ModelConfig(path=str(folder)),), warm_up=False)
    (built,) = build_engines(config, MetricFamilies(), worker, ignore_progress)
    engine = built.engine
    assert isinstance(engine, GenerationEngine)
    live = engine.live
    assert live is not None
    assert (live.read.digest is None) is is_rewritten


async def test_weights_that_come_back_find_their_kv(
    engine: AsyncEngine, folders: dict[float, Path], memory: DigestMemory
) -> None:
    finder = FolderContents(memory)
    finder.hash(finder.see(folders[0.5]))
    finder.join()
    await engine.control.update_weights_from_folder(str(folders[0.5]))
    await engine.control.reset_prefix_cache()
    first = await generate(engine, NAME, "first")
    assert first.num_cached == 0
    await engine.control.update_weights_from_folder(str(folders[1.0]))
    assert differ(await generate(engine, NAME, "between"), first)
    await engine.control.update_weights_from_folder(str(folders[0.5]))
    again = await generate(engine, NAME, "again")
    assert again.num_cached > 0
    assert is_same(again, first)


@pytest.mark.parametrize("is_known", [True, False])
async def test_equal_tensors_share_kv_only_if_their_digest_is_known(
    engine: AsyncEngine, folders: dict[float, Path], is_known: bool
) -> None:
    tensors = {CHANGED: HostTensor(tensor_of(folders[0.5], CHANGED) * 0.5)}
    digest: Future[str | None] = Future()
    if is_known:
        digest.set_result("digest")
    samples = []
    for name in ("first", "again"):
        # The base has the content that it had the first time.
        await engine.control.update_weights_from_folder(str(folders[0.5]))
        await engine.control.update_weights(WeightsUpdate(tensors=tensors), digest=digest)
        samples.append(await generate(engine, NAME, name))
    first, again = samples
    assert is_same(again, first)
    assert (again.num_cached > 0) is is_known


def tensor_of(folder: Path, name: str) -> np.ndarray:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    return np.array(loaded[name])


def differ(sample: Sample, other: Sample) -> bool:
    return not is_same(sample, other)


async def test_an_update_is_a_fresh_server_with_those_weights(
    engine: AsyncEngine, folders: dict[float, Path]
) -> None:
    old = await generate(engine, NAME, "old")
    tensors = {CHANGED: HostTensor(tensor_of(folders[0.5], CHANGED))}
    version = await engine.control.update_weights(
        WeightsUpdate(tensors=tensors, version="a", expected_version=DEFAULT_VERSION)
    )
    assert version.label == engine.control.version().label == "a"
    by_tensor = await generate(engine, NAME, "by-tensor")
    assert set(by_tensor.versions) == {"a"}
    assert by_tensor.num_cached == 0
    assert differ(by_tensor, old)
    with pytest.raises(VersionMismatchError):
        await engine.control.update_weights(
            WeightsUpdate(tensors=tensors, expected_version=DEFAULT_VERSION)
        )
    await engine.control.update_weights_from_folder(str(folders[1.0]))
    assert is_same(await generate(engine, NAME, "back"), old)
    await engine.control.update_weights_from_folder(str(folders[0.5]))
    assert is_same(await generate(engine, NAME, "by-folder"), by_tensor)


async def test_running_requests_go_on_with_new_weights(
    engine: AsyncEngine, folders: dict[float, Path]
) -> None:
    alone = await generate(engine, NAME, "alone", 150)
    # It is far from its end when the weights change.
    running = await begin(engine, NAME, "running", 150)
    await engine.control.update_weights_from_folder(str(folders[0.5]), version="b")
    straddling = await running
    switch = straddling.versions.index("b")
    assert straddling.versions == [DEFAULT_VERSION] * switch + ["b"] * (150 - switch)
    assert straddling.tokens[:switch] == alone.tokens[:switch]
    await engine.control.set_version("c")
    named = await generate(engine, NAME, "named", 4)
    assert set(named.versions) == {"c"}


async def test_what_does_not_fit_changes_nothing(
    engine: AsyncEngine, folders: dict[float, Path], tmp_path: Path
) -> None:
    old = await generate(engine, NAME, "old")
    weight = tensor_of(folders[0.5], CHANGED)
    broken = weight.copy()
    broken[3, 3] = np.nan
    wrong = {
        "infinite values": {CHANGED: HostTensor(broken)},
        "the model's is": {CHANGED: HostTensor(weight[:-1])},
        "unknown": {"model.layers.99.weight": HostTensor(weight)},
        "another kind": {CHANGED: HostTensor(weight.astype(np.int32))},
    }
    for reason, tensors in wrong.items():
        tensors["model.norm.weight"] = HostTensor(np.zeros(256, np.float32))
        with pytest.raises(InvalidRequestError, match=reason):
            await engine.control.update_weights(WeightsUpdate(tensors=tensors))
    with pytest.raises(InvalidRequestError, match="folder or tensors"):
        await engine.control.update_weights(WeightsUpdate())
    with pytest.raises(InvalidRequestError, match="not below a folder"):
        await engine.control.update_weights_from_folder(str(tmp_path))
    (folders[1.0].parent / "empty").mkdir(exist_ok=True)
    with pytest.raises(InvalidRequestError, match="has no model"):
        await engine.control.update_weights_from_folder("empty")
    assert engine.control.version().label == DEFAULT_VERSION
    assert is_same(await generate(engine, NAME, "same"), old)


@pytest.mark.parametrize("level", [1, 2])
async def test_memory_is_given_back_in_sleep(engine: AsyncEngine, level: int) -> None:
    control = engine.control
    info = GENERATION.client(engine).get_model(NAME).info
    alone = await generate(engine, NAME, "alone", 40)
    kept = await begin(engine, NAME, "kept", 40)
    awake = await engine.call(Do(lambda _: mx.get_active_memory()))
    await control.sleep(level, PauseMode.KEEP)
    assert control.sleep_level == level
    assert control.is_paused
    with pytest.raises(InvalidRequestError, match="asleep"):
        await control.resume()
    asleep = await engine.call(Do(lambda _: mx.get_active_memory()))
    promised = info.kv_bytes + (info.weight_bytes if level == 2 else 0)
    assert awake - asleep >= 0.9 * promised
    assert await control.wake_up(["weights"]) == ["kv_cache"]
    assert control.is_paused
    assert await control.wake_up() == []
    assert not control.is_paused
    assert (await kept).tokens == alone.tokens
    assert is_same(await generate(engine, NAME, "again", 40), alone)
    with pytest.raises(InvalidRequestError, match="level"):
        await control.sleep(3, PauseMode.KEEP)
    with pytest.raises(InvalidRequestError, match="tags"):
        await control.wake_up(["all"])


async def test_weights_come_back_as_the_folder_has_them(
    engine: AsyncEngine, folders: dict[float, Path]
) -> None:
    old = await generate(engine, NAME, "old")
    tensors = {CHANGED: HostTensor(tensor_of(folders[0.5], CHANGED))}
    await engine.control.update_weights(WeightsUpdate(tensors=tensors, version="lost"))
    await engine.control.sleep(2, PauseMode.ABORT)
    with pytest.raises(InvalidRequestError, match="not in memory"):
        await engine.control.update_weights(WeightsUpdate(tensors=tensors))
    await engine.control.wake_up()
    assert engine.control.version().label == DEFAULT_VERSION
    assert is_same(await generate(engine, NAME, "new"), old)


class Noted(Watcher):
    """Notes its notifications."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_sleep(self) -> None:
        self.notes.append("sleep")

    def on_wake(self) -> None:
        self.notes.append("wake")

    def on_weights(self, model: str) -> None:
        self.notes.append(f"weights of {model}")

    def on_unload(self, model: str) -> None:
        self.notes.append(f"unload {model}")


async def test_who_depends_on_weights_and_memory_is_notified(
    engine: AsyncEngine, folders: dict[float, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    control, watcher, forgotten = engine.control, Noted(), list[str]()
    control.watchers.append(watcher)
    (work,) = await engine.call(Do(lambda loop: loop.beside))
    monkeypatch.setattr(work, "forget", forgotten.append)
    await control.sleep(0, PauseMode.KEEP)
    await control.wake_up()
    watcher.notes.clear()
    await control.sleep(1, PauseMode.KEEP)
    assert (watcher.notes, forgotten) == (["sleep"], [NAME])
    await control.wake_up(["weights"])
    assert watcher.notes == ["sleep"]
    await control.wake_up()
    assert watcher.notes == ["sleep", "wake"]
    await control.update_weights_from_folder(str(folders[0.5]))
    assert watcher.notes == ["sleep", "wake", f"weights of {NAME}"]
    assert forgotten == [NAME] * 2
    with pytest.raises(InvalidRequestError):
        await control.update_weights(WeightsUpdate(tensors={}))
    assert len(watcher.notes) == 3
    control.watchers.remove(watcher)
