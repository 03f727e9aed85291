"""A third kind of model, which adds numbers: all that a kind needs."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.build import build_models
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.kind import (
    BuildContext,
    BuiltModel,
    KindBuilder,
    MemoryLimit,
    ModelFolder,
    OpenModel,
)
from mlx_parallm.engine.local_life import LocalLife
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.models import KindTraits, ModelMemory, ServedEngine, ServedModel
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.engine.turns import TurnClass
from mlx_parallm.types.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestAbortedError,
    StepError,
)
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.work import CacheScope, Ends, RequestWork

TRAITS = KindTraits(name="sum")
#: MAX_NUMBER: the engine refuses greater ones.
MAX_NUMBER = 1000


@dataclass(frozen=True, kw_only=True)
class SumRequest:
    request_id: str
    model: str
    numbers: tuple[int, ...]
    adapter: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.numbers)

    def entering(self, scope: CacheScope, rank: int | None, *, is_background: bool) -> SumRequest:
        return self

    def work(self) -> RequestWork:
        return RequestWork(num_tokens=len(self.numbers))


@dataclass(frozen=True)
class SumEvent:
    request_id: str
    results: int
    num_tokens: int = 0
    ends: Ends = Ends.REQUEST


@dataclass(frozen=True, kw_only=True)
class SumModel(ServedModel):
    names: tuple[str, ...]
    root: str
    num_bytes: int
    created: int = 0
    traits = TRAITS

    @property
    def memory(self) -> ModelMemory:
        return ModelMemory(weights=self.num_bytes)

    def check(self, request: SumRequest) -> None:
        if not request.numbers:
            raise InvalidRequestError("There is nothing to add.", param="numbers")


class SumEngine(ServedEngine):
    turn_class = TurnClass.FORWARD

    def __init__(self, name: str, done: Counter) -> None:
        self.policies = Policies(model=name)
        self._waiting: deque[SumRequest] = deque()
        self._done = done

    @property
    def waiting_since_s(self) -> float:
        return 0.0

    @property
    def num_requests(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._waiting) and not self.is_paused

    def submit(self, request: SumRequest, *, arrival_s: float | None = None) -> Sequence[SumEvent]:
        if max(request.numbers) > MAX_NUMBER:
            raise OverloadedError("That is too much.")
        self._waiting.append(request)
        return ()

    def step(self, within_s: float | None = None) -> Sequence[SumEvent | ErrorEvent]:
        request = self._waiting.popleft()
        if min(request.numbers) < 0:
            error = StepError("It counts up only.")
            return [ErrorEvent(request_id=request.request_id, error=error)]
        self._done.inc()
        return [SumEvent(request.request_id, sum(request.numbers))]

    def abort(self, request_id: str) -> bool:
        before = len(self._waiting)
        self._waiting = deque(
            request for request in self._waiting if request.request_id != request_id
        )
        return len(self._waiting) < before

    def cancel(self, request_id: str) -> Sequence[ErrorEvent]:
        error = RequestAbortedError("The request was cancelled.")
        return [ErrorEvent(request_id=request_id, error=error)] if self.abort(request_id) else []

    def release(self) -> None:
        assert not self._waiting


def sums_done(registry: CollectorRegistry) -> Counter:
    return Counter("test:sums", "Sums computed.", ("model_name",), registry=registry)


class PendingSum:
    def __init__(self, config: ModelConfig, path: Path, families: MetricFamilies) -> None:
        self.name = config.served_names[0]
        self.num_bytes = json.loads((path / "sum.json").read_text())["bytes"]
        self._config, self._families = config, families

    def advance(self) -> float:
        return 1.0

    def finish(self, kept: Policies | None = None) -> BuiltModel:
        root = str(self._config.path)
        names = self._config.served_names
        model = SumModel(names=names, root=root, num_bytes=self.num_bytes)
        done = self._families.of(sums_done).labels(self.name)
        return BuiltModel(self._config, model, SumEngine(self.name, done))

    def close(self) -> None:
        pass


class SumClient:
    """Sends numbers to the models behind a door."""

    def __init__(self, door: RequestDoor) -> None:
        self._door = door

    async def add(self, request_id: str, model: str, *numbers: int) -> int:
        request = SumRequest(request_id=request_id, model=model, numbers=numbers)
        reader: AnswerReader[int] = await self._door.open_reader(request)
        return await reader.results()


class SumKind(KindBuilder[SumClient]):
    traits = TRAITS

    def client(self, door: RequestDoor) -> SumClient:
        return SumClient(door)

    def declare(self, families: MetricFamilies) -> None:
        families.of(sums_done)

    def memory_limit(self, settings: EngineConfig) -> MemoryLimit | None:
        limit = settings.loading.max_encoder_bytes
        return None if limit is None else MemoryLimit(limit, "Sums", "--sum-memory")

    def serves(self, config: ModelConfig, path: Path) -> bool:
        return (path / "sum.json").is_file()

    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        return [
            PendingSum(folder.config, folder.path, context.families).finish() for folder in models
        ]

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        return lambda families, worker: PendingSum(config, path, families)


def sum_core(folder: Path, *names: str) -> EngineCore:
    """Return a core with models that add numbers; it is not started."""
    write_sum_model(folder, 1000)
    models = tuple(ModelConfig(path=str(folder), served_names=(name,)) for name in names)
    config, kinds = EngineConfig(models=models), (SumKind(),)
    build = partial(build_models, kinds)
    return EngineCore(config, kinds, LocalLife(config, lambda *_: None, build))


def write_sum_model(folder: Path, num_bytes: int) -> Path:
    folder.mkdir()
    (folder / "sum.json").write_text(json.dumps({"bytes": num_bytes}))
    return folder
