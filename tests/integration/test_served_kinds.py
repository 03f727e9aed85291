"""The protocol of served models: one suite for every kind, a third one among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter_folder
from mlx_parallm.api.http.auth import Caller
from mlx_parallm.api.http.scopes import engine_for
from mlx_parallm.config import (
    CacheConfig,
    EngineConfig,
    LoadingConfig,
    MemoryBound,
    MemoryConfig,
    ModelConfig,
)
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS, PREFIX
from mlx_parallm.engine.build import build_models
from mlx_parallm.engine.commands import Submit
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.local_life import LocalLife
from mlx_parallm.engine.models import KindTraits
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.engine.status import ModelState, RequestDoor
from mlx_parallm.generation.kind import GenerationClient
from mlx_parallm.generation.model import GENERATION_TRAITS
from mlx_parallm.nets.client import NetClient
from mlx_parallm.nets.model import NET_TRAITS
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import POOLING_TRAITS
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.build import BUILDERS, _generator_folders, planned_models
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    ParallmError,
    PausedError,
    RequestAbortedError,
)
from mlx_parallm.types.events import ErrorEvent, FinishReason, TokenEvent
from mlx_parallm.types.nets import ActParams, NetRequest, NetResults
from mlx_parallm.types.pooling import PoolingInput, PoolRequest
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import Event
from tests import adapter_files, sum_kind
from tests.builders.nets import write_net
from tests.sum_kind import SumClient, SumKind, SumRequest, write_sum_model

SERVED = (SumKind(), *BUILDERS)
SUM_BYTES = 1000


@dataclass(frozen=True)
class Case:
    """Use of one kind's models by the suite.

    Attributes:
        traits: the kind's traits.
        request: makes a request from an id and a model.
        wrong: makes a request that the model refuses.
        read: returns a reader's events in a comparable form.
        counter: a sample of the metrics that counts the computed work.
    """

    traits: KindTraits
    request: Callable[[str, str], Any]
    wrong: Callable[[str, str], Any]
    read: Callable[[Any], Awaitable[Any]]
    counter: str


def generate(request_id: str, model: str, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    return GenerateRequest(request_id=request_id, model=model, prompt_ids=prompt, params=params)


async def tokens_of(reader: Any) -> list[int]:
    tokens: list[int] = []
    async for event in reader:
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, TokenEvent):
            tokens += event.token_ids
            if event.finish_reason is FinishReason.ABORT:
                raise RequestAbortedError("It was cancelled.")
    return tokens


def embed(request_id: str, model: str) -> PoolRequest:
    return PoolRequest(request_id=request_id, model=model, inputs=(PoolingInput((1, 2, 3)),))


async def vectors_of(reader: Any) -> list[list[float]]:
    return [result.tolist() for result in await reader.results()]


def add(request_id: str, model: str) -> SumRequest:
    return SumRequest(request_id=request_id, model=model, numbers=(1, 2, 3))


def act(request_id: str, model: str, observation: float = 1.0) -> NetRequest:
    inputs = {"obs": np.full((2, 4), observation, np.float32)}
    return NetRequest(
        request_id=request_id, model=model, inputs=inputs, num_rows=2, act=ActParams()
    )


async def outputs_of(reader: Any) -> dict[str, list[float]]:
    return listed(await reader.results())


def listed(results: NetResults) -> dict[str, list[float]]:
    return {name: array.tolist() for name, array in results.outputs.items()}


async def sum_of(reader: Any) -> int:
    return await reader.results()


CASES = {
    "generation": Case(
        GENERATION_TRAITS,
        generate,
        lambda request_id, model: generate(request_id, model, prompt=()),
        tokens_of,
        'vllm:generation_tokens_total{engine="0",model_name="a"}',
    ),
    "pooling": Case(
        POOLING_TRAITS,
        embed,
        # A token that the embedding table does not have makes the batch fail.
        lambda request_id, model: PoolRequest(
            request_id=request_id, model=model, inputs=(PoolingInput((1,), task="mlm"),)
        ),
        vectors_of,
        'mlx_parallm:encoder_tokens_total{model_name="a"}',
    ),
    "net": Case(
        NET_TRAITS,
        act,
        lambda request_id, model: act(request_id, model, float("nan")),
        outputs_of,
        'mlx_parallm:net_rows_total{model_name="a"}',
    ),
    "sum": Case(
        sum_kind.TRAITS,
        add,
        lambda request_id, model: SumRequest(request_id=request_id, model=model, numbers=(-1,)),
        sum_of,
        'test:sums_total{model_name="a"}',
    ),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def folder(case: Case, tmp_path: Path) -> Path:
    if case.traits == sum_kind.TRAITS:
        return write_sum_model(tmp_path / "sum", SUM_BYTES)
    if case.traits == NET_TRAITS:
        return write_net(tmp_path / "net")
    return DEMO_FOLDER if case.traits == GENERATION_TRAITS else DEMO_FOLDERS[PREFIX + "embed"]


LONG = tuple(range(20, 50))
#: CONTEXT: tokens of a model that is loaded later.
CONTEXT = 64


def started(folder: Path, names: Sequence[str], max_bytes: int | None = None) -> EngineCore:
    models = tuple(ModelConfig(path=str(folder), served_names=(name,)) for name in names)
    config = EngineConfig(
        models=models,
        cache=CacheConfig(kv_cache_bytes=8 << 20),
        memory=MemoryConfig(limit=None if max_bytes is None else MemoryBound(size=max_bytes)),
        loading=LoadingConfig(min_use_s=0),
    )
    build = partial(build_models, SERVED)
    core = EngineCore(config, SERVED, LocalLife(config, lambda *_: None, build))
    core.start()
    return core


@pytest.fixture
async def core(folder: Path) -> AsyncIterator[EngineCore]:
    core = started(folder, "ab")
    yield core
    core.stop()


async def answer(core: EngineCore, case: Case, request_id: str, model: str) -> Any:
    return await case.read(await core.open_reader(case.request(request_id, model)))


async def asked_by_client(core: RequestDoor, case: Case) -> Any:
    """Return what the kind's own client gives for ``case.request``."""
    kind = next(kind for kind in SERVED if kind.traits == case.traits)
    client, request = kind.client(core), case.request("by client", "a")
    if isinstance(client, SumClient):
        return await client.add(request.request_id, "a", *request.numbers)
    if isinstance(client, GenerationClient):
        return await tokens_of((await client.submit(request)).events)
    if isinstance(client, NetClient):
        return listed(await client.run(request))
    assert isinstance(client, PoolingClient)
    return [result.tolist() for result in await client.encode(request)]


async def test_a_kind_has_its_client_through_any_door(core: EngineCore, case: Case) -> None:
    expected = await answer(core, case, "by reader", "a")
    assert await asked_by_client(core, case) == expected
    door: Any = core
    seen = engine_for(
        Caller(client="somebody", max_waiting=None), door, ServerConfig(api_keys=("one", "two"))
    )
    assert await asked_by_client(seen, case) == expected


async def test_two_models_answer_at_once_and_alike(core: EngineCore, case: Case) -> None:
    names = [(f"{number}", "ab"[number % 2]) for number in range(16)]
    answers = await asyncio.gather(*(answer(core, case, *arguments) for arguments in names))
    assert all(result == answers[0] for result in answers)
    assert answers[0]
    assert (await core.load()).num_requests == 0


async def test_an_error_ends_its_request_and_not_the_engine(core: EngineCore, case: Case) -> None:
    expected = await answer(core, case, "before", "a")
    with pytest.raises(ParallmError):
        await case.read(await core.open_reader(case.wrong("wrong", "a")))
    answers = await asyncio.gather(*(answer(core, case, str(n), "a") for n in range(4)))
    assert answers == [expected] * 4
    core.check_health()


async def test_unknown_models_and_ids_in_use_are_refused(core: EngineCore, case: Case) -> None:
    with pytest.raises(ModelNotFoundError, match=r"a.*b"):
        await core.open_reader(case.request("x", "unknown"))
    await core.control.pause(PauseMode.KEEP)
    reader = await core.open_reader(case.request("x", "a"))
    with pytest.raises(InvalidRequestError, match="already in use"):
        await core.open_reader(case.request("x", "b"))
    await core.control.resume()
    assert await case.read(reader)


async def test_a_paused_request_waits_and_others_are_refused(core: EngineCore, case: Case) -> None:
    await core.control.pause(PauseMode.KEEP)
    reader = await core.open_reader(case.request("x", "a"))
    assert not reader.is_complete
    assert await core.control.pause(PauseMode.KEEP) == 1
    await core.control.resume()
    assert await case.read(reader)
    await core.control.pause(PauseMode.WAIT)
    with pytest.raises(PausedError):
        await core.open_reader(case.request("x", "a"))


async def test_an_aborted_request_leaves_nothing(core: EngineCore, case: Case) -> None:
    await core.control.pause(PauseMode.KEEP)
    await core.open_reader(case.request("x", "a"))
    await core.abort("x")
    assert await core.control.pause(PauseMode.KEEP) == 0
    assert (await core.load()).num_requests == 0
    await core.control.resume()
    assert await answer(core, case, "x", "a")


async def test_a_cancelled_request_is_told(core: EngineCore, case: Case) -> None:
    await core.control.pause(PauseMode.KEEP)
    reader = await core.open_reader(case.request("x", "a"))
    await core.cancel("x")
    with pytest.raises(RequestAbortedError):
        await case.read(reader)


async def test_metrics_and_memory_are_told(core: EngineCore, case: Case) -> None:
    await answer(core, case, "x", "a")
    text = (await core.render_metrics())[0].decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    assert float(samples[case.counter]) > 0
    memory = await core.memory()
    assert memory["a"].weights > 0
    sample = 'mlx_parallm:model_memory_bytes{kind="weights",model_name="a"}'
    assert float(samples[sample]) == memory["a"].weights


async def test_models_are_loaded_and_unloaded(core: EngineCore, case: Case, folder: Path) -> None:
    third = ModelLoad(model=str(folder), names=("c",))
    assert (await core.load_model(third)).state is ModelState.LOADED
    assert await answer(core, case, "x", "c") == await answer(core, case, "y", "a")
    await core.unload_model("a")
    with pytest.raises(ModelNotFoundError):
        await core.open_reader(case.request("x", "a"))
    assert set(await core.memory()) == {"b", "c"}
    assert await answer(core, case, "x", "b")


async def test_what_does_not_fit_is_evicted_and_comes_back(case: Case, folder: Path) -> None:
    model = started(folder, "a")
    (alone,) = (await model.memory()).values()
    expected = await answer(model, case, "x", "a")
    model.stop()
    core = started(folder, "a", max_bytes=int(1.5 * (alone.weights + alone.kv)))
    roots = ModelLoad(model=str(folder), names=("b",), max_model_len=CONTEXT)
    await core.load_model(roots)
    for number in range(6):
        assert await answer(core, case, str(number), "ab"[number % 2]) == expected
    states = {status.names[0]: status.state for status in core.statuses()}
    assert states == {"a": ModelState.EVICTED, "b": ModelState.LOADED}
    memory = await core.memory()
    assert (memory["a"].weights, memory["b"].weights) == (0, alone.weights)
    core.stop()


async def test_a_generator_comes_back_with_its_adapters(tmp_path: Path) -> None:
    first = started(DEMO_FOLDER, "a")
    (alone,) = (await first.memory()).values()
    first.stop()
    core = started(DEMO_FOLDER, "a", max_bytes=int(1.5 * (alone.weights + alone.kv)))
    weights = read_adapter_folder(adapter_files.save(tmp_path / "adapter", 1), param="path")
    await core.control.load_adapter(AdapterUpload(name="policy", weights=weights), model="a")

    async def tokens(name: str) -> list[int]:
        return await tokens_of(await core.open_reader(generate("x", name, prompt=LONG)))

    expected = {name: await tokens(name) for name in ("policy", "a")}
    assert expected["policy"] != expected["a"]
    for number in range(2):
        await core.load_model(ModelLoad(model=str(DEMO_FOLDER), names=(f"b{number}",)))
        states = {status.names[0]: status.state for status in core.statuses()}
        assert states["a"] is ModelState.EVICTED
        assert {name: await tokens(name) for name in expected} == expected
    core.stop()


async def test_a_model_sleeps_and_wakes(core: EngineCore, case: Case) -> None:
    before = await answer(core, case, "x", "a")
    await core.control.sleep(1, PauseMode.KEEP)
    assert core.control.sleep_level == 1
    reader = await core.open_reader(case.request("y", "a"))
    assert await core.control.wake_up() == []
    assert await case.read(reader) == before
    assert not core.control.is_paused


async def test_weights_change_or_that_is_refused(
    core: EngineCore, case: Case, folder: Path
) -> None:
    update = WeightsUpdate(folder=folder, version="new")
    if case.traits.can_change:
        assert (await core.control.update_weights(update, model="a")).label == "new"
        assert core.control.version("a").label == "new"
    else:
        with pytest.raises(InvalidRequestError, match=r"^a .*weights") as refusal:
            await core.control.update_weights(update, model="a")
        assert refusal.value.param == "model"
    assert await answer(core, case, "x", "a")


class Collected:
    """Collects the events of a request on the engine thread."""

    num_samples, is_overfull, has_one_event = 0, False, False

    def __init__(self, request: Any) -> None:
        self.request = request
        self.events: list[Event] = []
        self.done = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    @property
    def is_complete(self) -> bool:
        if not self.events:
            return False
        last = self.events[-1]
        return not isinstance(last, TokenEvent) or last.finish_reason is not None

    def put(self, event: Event) -> None:
        if type(event).__name__ == "PromptEvent":
            return
        self.events.append(event)
        if self.is_complete:
            self.loop.call_soon_threadsafe(self.done.set)

    def fail(self, error: ParallmError) -> None:
        raise AssertionError(error)


async def test_the_core_is_its_own_client(core: EngineCore, case: Case) -> None:
    reader = Collected(case.request("own", "a"))
    refusal = await core.mailbox.ask(
        lambda reply: Submit(request=reader.request, arrival_s=0.0, reader=reader, reply=reply)
    )
    assert refusal is None
    await reader.done.wait()
    assert not any(isinstance(event, ErrorEvent) for event in reader.events)
    assert (await core.load()).num_requests == 0


def test_the_generators_are_found_beside_any_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.serving.build.BUILDERS", SERVED)
    folders = {"sum": write_sum_model(tmp_path / "sum", SUM_BYTES), "chat": DEMO_FOLDER}
    models = tuple(
        ModelConfig(path=str(folder), served_names=(name,)) for name, folder in folders.items()
    )
    config = EngineConfig(models=models, cache=CacheConfig(kv_cache_bytes=8 << 20))
    assert _generator_folders(config) == {"chat": DEMO_FOLDER}
    ((share, tokenizer),) = planned_models(config)
    assert share.name == "chat"
    assert tokenizer == "TokenizersBackend (tokenizers)"
