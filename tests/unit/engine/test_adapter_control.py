"""Names of adapters of several models, over scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from prometheus_client import CollectorRegistry

from mlx_parallm.config import AdapterConfig, EngineConfig, ModelConfig
from mlx_parallm.engine.adapter_control import AdapterNames
from mlx_parallm.engine.adapter_folders import AdapterFolders
from mlx_parallm.engine.changes import LoadAdapter, stage
from mlx_parallm.engine.commands import EngineCommand, EngineDoor, LoopState
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.control_metrics import ControlMetrics
from mlx_parallm.engine.device import DeviceAdapters
from mlx_parallm.engine.models import KindTraits, ServedModel
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.engine.residency import ModelEntry
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.generation.model import GENERATION_TRAITS
from mlx_parallm.nets.model import NET_TRAITS
from mlx_parallm.pooling.adapters import EncoderAdapterSet
from mlx_parallm.pooling.model import POOLING_TRAITS
from mlx_parallm.types.errors import EngineDeadError, InvalidRequestError, ModelNotFoundError
from tests.sum_kind import SumModel
from tests.version_harness import SlotRecord, adapter

T = TypeVar("T")


class TwoEncoders(EngineDoor):
    """The door to engines that have the encoders "m" and "n" and answer a turn later."""

    def __init__(self) -> None:
        self.names = [("m",), ("n",)]
        self.sets = {
            name: EncoderAdapterSet(name, cast("DeviceAdapters", SlotRecord()), EngineConfig())
            for name in "mn"
        }
        policies = {name: adapters.policies for name, adapters in self.sets.items()}
        state = SimpleNamespace(engines={}, policies=policies, missed={}, stagings={})
        self._state = cast(LoopState, state)

    def statuses(self) -> list[ModelStatus]:
        return [ModelEntry(ModelConfig(), names).status() for names in self.names]

    def status_of(self, name: str) -> ModelStatus | None:
        return next((status for status in self.statuses() if name in status.names), None)

    def model_names(self) -> list[str]:
        return [name for names in self.names for name in names]

    @asynccontextmanager
    async def hold(self, model: str) -> AsyncIterator[None]:
        assert model in self.sets
        yield

    async def call(self, action: EngineCommand[T]) -> T:
        await asyncio.sleep(0)
        result = action(self._state)
        await asyncio.sleep(0)
        return result

    def send(self, action: EngineCommand[Any]) -> None:
        raise AssertionError

    def ask(self, question: Any, key: Any = None) -> Any:
        raise AssertionError

    async def cancel_all(self) -> int:
        raise AssertionError

    def open_requests(self) -> Any:
        raise AssertionError

    async def wait_until_idle(self) -> None:
        raise AssertionError


class FoundAdapters(EngineControl):
    """Finds an adapter of every name."""

    async def read_named(self, name: str) -> AdapterUpload:
        await asyncio.sleep(0)
        return adapter(name, "digest-1", None)


@pytest.fixture
def door() -> TwoEncoders:
    return TwoEncoders()


@pytest.fixture
def control(door: TwoEncoders) -> EngineControl:
    return FoundAdapters(door, AdapterConfig(), ControlMetrics(CollectorRegistry(), 8))


def owners(door: TwoEncoders) -> list[str]:
    return [info.model for adapters in door.sets.values() for info in adapters.policies.infos()]


def check_one_owner(door: TwoEncoders, results: list[Any]) -> None:
    """One of two loads was refused, and left no slot in use."""
    (refusal,) = (result for result in results if isinstance(result, BaseException))
    assert isinstance(refusal, InvalidRequestError)
    assert refusal.param == "name"
    assert "unload it first" in str(refusal)
    assert len(owners(door)) == 1
    assert [adapters.adapters.num_used for adapters in door.sets.values()] == [0, 0]


async def test_two_models_that_are_given_one_name_at_once_do_not_share_it(
    door: TwoEncoders, control: EngineControl
) -> None:
    upload = adapter("a", "digest-1", None)
    loads = (control.load_adapter(upload, model=name) for name in "mn")
    check_one_owner(door, await asyncio.gather(*loads, return_exceptions=True))
    (info,) = control.adapters()
    assert [info.model] == owners(door)


async def test_a_name_that_is_found_for_two_models_at_once_is_one_models(
    door: TwoEncoders, control: EngineControl
) -> None:
    loads = (control.ensure_loaded("a", name) for name in "mn")
    check_one_owner(door, await asyncio.gather(*loads, return_exceptions=True))


async def test_a_loaded_name_is_not_another_models(
    door: TwoEncoders, control: EngineControl
) -> None:
    await control.ensure_loaded("a", "m")
    await control.ensure_loaded("a", "m")
    with pytest.raises(InvalidRequestError, match="adapter of 'm'"):
        await control.ensure_loaded("a", "n")
    assert owners(door) == ["m"]


async def test_adapters_of_a_model_that_is_being_unloaded_are_not_listed(
    door: TwoEncoders, control: EngineControl
) -> None:
    await control.ensure_loaded("a", "m")
    await control.ensure_loaded("b", "n")
    door.names.remove(("m",))
    assert [info.name for info in control.adapters()] == ["b"]


async def test_a_kept_adapter_is_served_until_it_is_forgotten(
    door: TwoEncoders, control: EngineControl, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    await control.keep("ft:m:a:1", "m", first)
    assert owners(door) == ["m"]
    await control.keep("later", "n", second, loads=False)
    assert list(control.unloaded()) == ["later"]
    named = control.names.named("later")
    assert named is not None
    assert (named.base, named.source) == ("n", str(second))
    await control.ensure_loaded("later", "n")
    assert list(control.unloaded()) == []
    # Another folder takes its place.
    await control.keep("later", "n", first, loads=False)
    assert list(control.unloaded()) == ["later"]
    for name in ("later", "ft:m:a:1", "none"):
        await control.forget_kept(name)
    assert control.adapters() == []
    assert control.names.named("later") is None


async def test_other_processes_learn_of_kept_adapters_even_if_the_engine_fails(
    door: TwoEncoders, control: EngineControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[list[str]] = []

    async def announce() -> None:
        announced.append(list(control.names.kept))

    async def fail(action: EngineCommand[Any]) -> Any:
        raise EngineDeadError("The engine died.")

    control.announce = announce
    await control.keep("a", "m", tmp_path / "first")
    with monkeypatch.context() as broken:
        broken.setattr(door, "call", fail)
        with pytest.raises(EngineDeadError):
            await control.keep("a", "m", tmp_path / "second")
        with pytest.raises(EngineDeadError):
            await control.forget_kept("a")
    assert announced == [["a"], ["a"], []]


async def test_a_kept_adapter_waits_for_room(
    control: EngineControl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = EngineConfig().adapters.max_loaded
    for number in range(limit):
        # One that came from no folder is not evicted.
        own = replace(adapter(f"own-{number}", f"digest-{number}", None), source=None)
        await control.load_adapter(own, model="m")
    await control.keep("ft:m:a:1", "m", tmp_path)
    assert "is loaded once a request names it" in caplog.text
    assert list(control.unloaded()) == ["ft:m:a:1"]
    with pytest.raises(InvalidRequestError, match=str(limit)):
        await control.ensure_loaded("ft:m:a:1", "m")
    await control.unload_adapter("own-0")
    await control.ensure_loaded("ft:m:a:1", "m")
    assert list(control.unloaded()) == []


async def test_spared_adapters_are_evicted_by_a_change_that_names_them_alone(
    control: EngineControl,
) -> None:
    limit = EngineConfig().adapters.max_loaded
    names = [f"own-{number}" for number in range(limit)]
    for number, name in enumerate(names):
        await control.load_adapter(adapter(name, f"digest-{number}", None), model="m")
    control.spared = lambda _: frozenset(names)
    more = adapter("more", "digest-more", None)
    with pytest.raises(InvalidRequestError, match=str(limit)):
        await stage(LoadAdapter(more, "m"), control)
    with pytest.raises(InvalidRequestError, match=str(limit)):
        await control.ensure_loaded("found", "m")
    # One that is not there makes no room.
    with pytest.raises(InvalidRequestError, match=str(limit)):
        await stage(LoadAdapter(more, "m", evicted="other"), control)
    await control.here.apply(LoadAdapter(more, "m", evicted="own-3"))
    assert {info.name for info in control.adapters()} == {"more", *names} - {"own-3"}
    # It is evicted where there is room, too: servers that change together have the same.
    await control.unload_adapter("own-1")
    last = adapter("last", "digest-last", None)
    await control.here.apply(LoadAdapter(last, "m", evicted="own-2"))
    assert "own-2" not in {info.name for info in control.adapters()}


async def test_a_kept_adapter_of_no_model_is_not_listed(
    control: EngineControl, tmp_path: Path
) -> None:
    await control.keep("gone", "other", tmp_path / "a", loads=False)
    assert list(control.unloaded()) == []


@pytest.mark.parametrize("traits", [GENERATION_TRAITS, POOLING_TRAITS, NET_TRAITS])
def test_refusals_of_requests_of_another_kind_fit_the_routes_of_all(traits: KindTraits) -> None:
    for other in (GENERATION_TRAITS, POOLING_TRAITS, NET_TRAITS):
        assert f"not a {other.name}" not in traits.refuses_other
    assert "cannot generate" not in traits.refuses_other


SUM = SumModel(names=("sum", "alias"), root="r", num_bytes=0)


class Served:
    """Models that requests may name, some of which are known."""

    def __init__(self, **models: ServedModel | None) -> None:
        self._models = models

    def statuses(self) -> list[ModelStatus]:
        return [
            replace(ModelEntry(ModelConfig(), (name,)).status(), model=model)
            for name, model in self._models.items()
        ]

    def status_of(self, name: str) -> ModelStatus | None:
        return next((status for status in self.statuses() if name in status.names), None)

    def model_names(self) -> list[str]:
        return list(self._models)


def names_of(served: Served, folder: Path) -> AdapterNames:
    """Return the names of a server with the adapter "style" in its folder of adapters."""
    (folder / "style").mkdir(exist_ok=True)
    (folder / "style" / "adapter_config.json").write_text("{}")
    return AdapterNames(served, AdapterFolders(AdapterConfig(directory=str(folder))))


def test_adapters_without_a_model_are_of_the_first_that_takes_some(tmp_path: Path) -> None:
    pooling = cast("ServedModel", SimpleNamespace(traits=POOLING_TRAITS))
    names = names_of(Served(sum=SUM, embed=pooling, later=None), tmp_path)
    assert names.adapted(None) == "embed"
    assert [names.adapted(name) for name in ("embed", "later")] == ["embed", "later"]
    adapters = [names.named(name) for name in ("style", "embed:style", "later:style", "sum:style")]
    assert [each and (each.name, each.base) for each in adapters] == [
        ("style", "embed"),
        ("style", "embed"),
        ("style", "later"),
        None,
    ]
    with pytest.raises(ModelNotFoundError):
        names.adapted("other")


def test_models_that_take_no_adapters_say_so(tmp_path: Path) -> None:
    net = cast("ServedModel", SimpleNamespace(traits=NET_TRAITS))
    names = names_of(Served(sum=SUM, net=net), tmp_path)
    with pytest.raises(InvalidRequestError, match="net is a net: nets take whole weights"):
        names.adapted("net")
    with pytest.raises(InvalidRequestError, match="sum takes no adapters") as refusal:
        names.adapted("sum")
    assert refusal.value.param == "model"
    with pytest.raises(InvalidRequestError, match="No model here takes adapters") as refusal:
        names.adapted(None)
    assert refusal.value.param == "model"
    assert names.named("style") is None
    assert names_of(Served(), tmp_path).named("style") is None


@pytest.mark.parametrize(
    ("traits", "takes"),
    [(GENERATION_TRAITS, True), (POOLING_TRAITS, True), (NET_TRAITS, False), (SUM.traits, False)],
)
def test_kinds_say_whether_they_take_adapters(traits: KindTraits, takes: bool) -> None:
    assert traits.takes_adapters is takes
