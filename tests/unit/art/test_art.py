"""The backend for ART without a server: its tables, its folders, its rules."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.art import (
    BackendError,
    CheckpointError,
    DeviceConfig,
    MLXParallmBackend,
    ServerAddress,
    ServerConfig,
    ServerStartError,
    ServerTrainer,
    TrainJob,
    UnservedStepError,
    WeightSync,
    backend,
)
from mlx_parallm.art.config import Devices
from mlx_parallm.art.server import ManagedServer
from mlx_parallm.art.serving import Checkpoints, ServedPolicy, is_adapter
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.confinement import is_spelled
from mlx_parallm.machine import count_cuda_devices
from mlx_parallm.types.errors import ConfigError


async def never_trains(job: TrainJob) -> dict[str, float]:
    """Fail, as no test here trains anything."""
    raise AssertionError(job)


@given(count=st.integers(0, 16))
def test_one_device_is_shared_and_several_are_split(count: int) -> None:
    resolved = DeviceConfig().resolved(count)
    assert resolved.is_split == (count > 1)
    assert resolved.inference == (0,)
    assert resolved.training == (tuple(range(1, count)) if count > 1 else (0,))


@given(count=st.integers(0, 16), num_engines=st.integers(1, 8))
def test_each_engine_has_a_device_and_the_trainer_has_the_others(
    count: int, num_engines: int
) -> None:
    resolved = DeviceConfig().resolved(count, num_engines=num_engines)
    assert resolved.is_split == (count > num_engines)
    assert resolved.inference == tuple(range(num_engines))
    others = tuple(range(num_engines, count))
    assert resolved.training == (others or (0,))


@given(
    count=st.integers(0, 8),
    num_engines=st.integers(1, 4),
    inference=st.none() | st.integers(0, 8),
    training=st.none() | st.lists(st.integers(0, 8), min_size=1),
    auto_detect=st.booleans(),
)
def test_devices_that_are_named_are_kept(
    count: int,
    num_engines: int,
    inference: int | None,
    training: list[int] | None,
    auto_detect: bool,
) -> None:
    config = DeviceConfig(
        inference_device=inference, training_devices=training, auto_detect=auto_detect
    )
    resolved = config.resolved(count, num_engines=num_engines)
    first = resolved.inference[0]
    assert resolved.inference == tuple(range(first, first + num_engines))
    if inference is not None:
        assert first == inference
    if training is not None:
        assert resolved.training == tuple(training)


def test_what_is_not_named_is_chosen_around_what_is() -> None:
    assert DeviceConfig(inference_device=1).resolved(3) == Devices((1,), (0, 2))
    assert DeviceConfig(inference_device=1).resolved(1) == Devices((1,), (0,))
    assert DeviceConfig(inference_device=0).resolved(0) == Devices((0,), (0,))
    trainer_first = DeviceConfig(training_devices=[0])
    assert trainer_first.resolved(2) == Devices((1,), (0,))
    assert trainer_first.resolved(4, num_engines=2) == Devices((1, 2), (0,))
    assert trainer_first.resolved(1) == Devices((0,), (0,))
    assert DeviceConfig(auto_detect=False).resolved(8) == Devices((0,), (1,))


def test_devices_of_several_engines_are_not_shared_in_part() -> None:
    named = DeviceConfig(inference_device=1, training_devices=(0,))
    assert named.resolved(num_engines=3) == Devices((1, 2, 3), (0,))
    assert named.resolved(num_engines=3).is_split
    shared = DeviceConfig(inference_device=0, training_devices=(1,))
    assert shared.resolved().is_split
    assert not shared.resolved(num_engines=2).is_split


def test_a_backend_takes_devices_as_its_users_write_them() -> None:
    own = MLXParallmBackend(never_trains, inference_device=2, training_devices=[3, 1])
    assert own._devices == Devices((2,), (3, 1))
    with pytest.raises(ConfigError, match="not by both"):
        MLXParallmBackend(never_trains, inference_device=0, device_config=DeviceConfig())


@pytest.mark.parametrize(
    "wrong",
    [
        {"inference_device": -1},
        {"inference_device": True},
        {"inference_device": "0"},
        {"training_devices": (-1,)},
        {"training_devices": ()},
        {"training_devices": 1},
        {"training_devices": "1"},
        {"training_devices": [1.0]},
    ],
)
def test_devices_that_cannot_be(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        DeviceConfig(**wrong)
    with pytest.raises(ConfigError):
        MLXParallmBackend(never_trains, **wrong)


def test_cuda_devices_are_counted(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert count_cuda_devices({}, tmp_path) == 2
    assert count_cuda_devices({}, tmp_path / "none") == 0
    assert count_cuda_devices({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert count_cuda_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_cuda_devices({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


def test_each_rank_has_a_device() -> None:
    config = ServerConfig(tensor_parallel_size=2)
    assert DeviceConfig().resolved(3, num_engines=config.num_devices).inference == (0, 1)
    with pytest.raises(ConfigError, match="cannot both be above 1"):
        ServerConfig(tensor_parallel_size=2, data_parallel_size=2)


def test_every_setting_becomes_a_flag_that_serve_knows() -> None:
    config = ServerConfig(
        mem_fraction_static=0.25,
        disable_radix_cache=True,
        max_loras_per_batch=2,
        context_length=512,
        data_parallel_size=2,
        flags=("--seed", "3"),
    )
    flags = config.to_flags()
    assert flags[flags.index("--data-parallel-size") + 1] == "2"
    assert flags[-2:] == ["--seed", "3"]
    assert flags[flags.index("--kv-memory-fraction") + 1] == "0.25"
    assert flags[flags.index("--max-loras") + 1] == "2"
    assert flags[flags.index("--max-model-len") + 1] == "512"
    assert "--no-enable-prefix-caching" in flags
    names = {name for setting in SETTINGS for name in setting.names}
    names_of_flags = [flag.removeprefix("--") for flag in flags[:-2] if flag.startswith("--")]
    assert {name.removeprefix("no-") for name in names_of_flags} <= names


def test_defaults_are_those_of_the_guide() -> None:
    config = ServerConfig()
    assert (config.mem_fraction_static, config.max_loras_per_batch) == (0.9, 4)
    assert (config.disable_radix_cache, config.flush_cache_on_sync) == (False, False)
    assert (config.context_length, config.start_timeout_s({})) == (None, 120.0)
    assert config.weight_sync_method is WeightSync.LORA
    named: Any = "disk"
    assert ServerConfig(weight_sync_method=named).weight_sync_method is WeightSync.DISK


def test_the_variable_of_art_says_how_long_a_start_may_take() -> None:
    assert ServerConfig().start_timeout_s({"ART_SERVER_TIMEOUT": "600"}) == 600
    assert ServerConfig(server_timeout=7).start_timeout_s({"ART_SERVER_TIMEOUT": "600"}) == 7
    for wrong in ("soon", "0", "nan"):
        with pytest.raises(ConfigError, match="ART_SERVER_TIMEOUT"):
            ServerConfig().start_timeout_s({"ART_SERVER_TIMEOUT": wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"mem_fraction_static": 0},
        {"mem_fraction_static": 1.01},
        {"max_loras_per_batch": 0},
        {"data_parallel_size": 0},
        {"context_length": 0},
        {"server_timeout": 0},
        {"weight_sync_method": "nccl"},
    ],
)
def test_settings_that_cannot_be(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)


def test_a_checkpoint_counts_once_it_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert (checkpoints.latest(), checkpoints.folder(1)) == (0, None)
    with checkpoints.writing(1) as target:
        (target / "adapter_config.json").write_text("{}")
        assert checkpoints.steps() == []
    assert checkpoints.steps() == [1]
    folder = checkpoints.folder(1)
    assert folder is not None
    assert folder.name == "0001"
    assert is_adapter(folder)
    with contextlib.suppress(ZeroDivisionError), checkpoints.writing(2) as target:
        (target / "half").write_text("")
        raise ZeroDivisionError
    assert checkpoints.steps() == [1]
    with pytest.raises(CheckpointError), checkpoints.writing(2):
        pass
    assert checkpoints.latest() == 1
    checkpoints.delete(1)
    assert list(checkpoints.root.iterdir()) == []


async def test_a_server_that_ends_is_told_with_its_words(tmp_path: Path) -> None:
    server = ManagedServer(["--no-such-flag"], log=tmp_path / "logs" / "log")
    with pytest.raises(ServerStartError, match="no-such-flag"):
        await server.wait_until_ready(1e6)
    assert not server.is_running


async def test_a_server_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    script.chmod(0o755)
    server = ManagedServer([], log=tmp_path / "log", python=str(script))
    with pytest.raises(ServerStartError, match="not ready after"):
        await server.wait_until_ready(0.05)
    assert not server.is_running


async def test_a_policy_that_is_not_served_says_so(tmp_path: Path) -> None:
    devices = Devices((0,), (1,))
    policy = ServedPolicy(
        "p", "m", tmp_path, ServerConfig(weight_sync_method=WeightSync.DISK), devices
    )
    with pytest.raises(BackendError, match="not served"):
        _ = policy.url
    with pytest.raises(UnservedStepError, match="Step 3"):
        policy.inference_name(3)
    assert policy.inference_name() == "p"
    many = ServedPolicy("p", "m", tmp_path, ServerConfig(), devices)
    assert many.inference_name(3) == "p@3"


async def test_what_cannot_be_trained_has_no_server(tmp_path: Path) -> None:
    class Judge:
        name, project, trainable = "judge", "p", False
        base_path = ""

        def _storage_name(self) -> str:
            return self.name

    backend = MLXParallmBackend(never_trains, path=tmp_path)
    judge = Judge()
    await backend.register(judge)
    assert judge.base_path == str(tmp_path)
    with pytest.raises(BackendError, match="judge"):
        await backend._get_step(judge)
    await backend.close()


async def test_two_models_do_not_share_a_folder_where_case_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Register two names that a Mac's disk takes for one, which it lists as the first."""

    def names_in(folder: Path) -> list[str]:
        return [path.name.lower() for path in folder.iterdir()]

    monkeypatch.setattr(backend, "is_spelled", partial(is_spelled, list_names=names_in))
    own = MLXParallmBackend(never_trains, path=tmp_path)
    for name in ("agent", "Agent"):
        model = SimpleNamespace(name=name, project="p", _storage_name=lambda name=name: name)
        refusal = pytest.raises(BackendError, match="differs by case alone")
        with contextlib.nullcontext() if name == "agent" else refusal:
            await own.register(model)


@pytest.mark.parametrize(
    "settings", [{"weight_sync_method": "disk"}, {"tensor_parallel_size": 2}], ids=str
)
def test_a_server_that_cannot_be_trained_is_refused(tmp_path: Path, settings: dict) -> None:
    config = ServerConfig(**settings)
    with pytest.raises(ConfigError, match=next(iter(settings))):
        MLXParallmBackend(ServerTrainer(), path=tmp_path, server_config=config)
    # A trainer of the user's own may bring what it likes.
    MLXParallmBackend(never_trains, path=tmp_path, server_config=config)


#: ``REFUSED``: values of each setting of a trainer that no session takes.
REFUSED: dict[str, list[Any]] = {
    "rank": [0, 1.5, True],
    "minibatch": [0, 1.5, True],
    "alpha": [0, math.nan, math.inf],
    "max_grad_norm": [0, math.nan, math.inf],
    "learning_rate": [-1, math.nan, math.inf],
    "clip_low": [-1, 2, math.nan],
    "clip_high": [-1, math.nan, math.inf],
    "kl": [-1, math.nan, math.inf],
}


@pytest.mark.parametrize("name", [each.name for each in fields(ServerTrainer)])
def test_settings_of_a_trainer_are_checked(name: str) -> None:
    if name == "chat_template_kwargs":
        return
    for value in REFUSED[name]:
        with pytest.raises(ConfigError, match=name):
            ServerTrainer(**{name: value})
    ServerTrainer(learning_rate=0, clip_low=0, clip_high=0, kl=0)


async def test_sft_without_a_batch_is_refused() -> None:
    job = TrainJob(
        kind="sft",
        model=SimpleNamespace(name="policy"),
        data=[],
        step=1,
        previous=None,
        target=Path(),
        devices=(),
        options={"config": SimpleNamespace(batch_size=0)},
        server=ServerAddress("http://127.0.0.1:1", None),
    )
    with pytest.raises(BackendError, match="batch_size must be at least 1"):
        await ServerTrainer()(job)


async def test_a_server_that_does_not_run_is_not_trained(tmp_path: Path) -> None:
    backend = MLXParallmBackend(ServerTrainer(), path=tmp_path)
    model = SimpleNamespace(
        name="policy", project="p", base_model="m", trainable=True, _storage_name=lambda: "r"
    )
    with pytest.raises(BackendError, match="register the model first"):
        await backend._train("rl", model, [], {})


def test_the_key_of_a_server_is_not_shown() -> None:
    assert "secret" not in repr(ServerAddress("http://127.0.0.1:1", "secret"))
