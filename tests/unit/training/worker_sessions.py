"""Training sessions on a tiny masked LM, without an engine thread: ops run where they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from mlx_parallm.config import ModelConfig
from mlx_parallm.training.batches import BatchOrder
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Example, MezoRecord, Mode, SessionConfig, StepRecord
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.session import Session
from mlx_parallm.training.settings import MezoSettings
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import TrainableSpec
from mlx_parallm.worker.ops import Load, Op, Unload
from mlx_parallm.worker.pooling.loading import PoolingLoader
from mlx_parallm.worker.pooling.plan import PoolingSpec
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.worker import Worker
from tests.encoder_folders import golden_arrays, read_golden, write_encoder, write_golden

MODEL = "model"
WORDS = (3, 9)
TEXTS = ((5, 6, 7), (8, 9), (5, 7, 6, 6), (9, 10, 8), (11, 5), (7, 7, 7, 7, 7), (10, 9), (6,))
EXAMPLES = [
    Example(PoolingInput((*text, 4), "mlm", places=(len(text),), candidates=WORDS), number % 2)
    for number, text in enumerate(TEXTS)
]
CONFIG = SessionConfig(
    id="",
    model=MODEL,
    trainable=TrainableSpec(targets=("query", "value"), layers=(1,), rank=2, alpha=4.0),
    estimator=MezoSettings(),
    measure=Measure.CROSS_ENTROPY,
    objective={},
    batch_size=4,
    order=BatchOrder.RANDOM,
    mode=Mode.PAIRED,
    max_tokens=4096,
    seed=7,
    created_at=0,
)

Open = Callable[..., TrainingService]


def config_of(**changes: Any) -> Callable[[str, int], SessionConfig]:
    """Return what makes a session's settings, with some that differ from ``CONFIG``."""
    return lambda name, time: replace(CONFIG, **changes, id=name, created_at=time)


def mezo(record: StepRecord) -> MezoRecord:
    """Return a record; check that it is of a step from losses."""
    assert isinstance(record, MezoRecord)
    return record


async def begin(service: TrainingService, **changes: Any) -> Session:
    return await service.create(config_of(**changes), EXAMPLES)


async def digest(session: Session, step: int | None = None) -> str:
    return (await session.weights(step)).digest


def three_layers(folder: Path) -> Path:
    """Write the model with another layer at the top."""
    golden = read_golden("bert_masked_lm")
    weights = golden_arrays(golden)
    more = {
        name.replace(".layer.1.", ".layer.2."): 0.9 * array
        for name, array in weights.items()
        if ".layer.1." in name
    }
    return write_encoder(folder, golden["config"] | {"num_hidden_layers": 3}, weights | more)


def other_weights(folder: Path) -> Path:
    """Write the model with one tensor that differs."""
    golden = read_golden("bert_masked_lm")
    weights = golden_arrays(golden)
    name = min(weights)
    return write_encoder(folder, golden["config"], weights | {name: weights[name] + 1e-3})


class WorkerTrain:
    """Runs ops on a worker of its own.

    Attributes:
        requests: all that were run.
        fail: raised by the next request, once.
        worker: the worker.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[TrainingRequest] = []
        self.fail: Exception | None = None
        self.worker = Worker()
        self.worker.install(PoolingSpec, PoolingLoader(TrainingSessions))
        self.load(write_golden(folder, read_golden("bert_masked_lm")))

    def load(self, folder: Path) -> None:
        """Load a model anew, so that its sessions are lost."""
        self.worker.execute(Unload(model=MODEL))
        config = ModelConfig(path=str(folder))
        spec = PoolingSpec(config=config, path=folder, task="auto", chosen=(), free_bytes=None)
        self.worker.execute(Load(model=MODEL, spec=spec))

    def execute(self, op: Op[Any]) -> Any:
        """Run one op besides those of requests."""
        return self.worker.execute(op)

    async def __call__(self, request: TrainingRequest) -> tuple[Any, ...]:
        """See ``service.Train``."""
        self.requests.append(request)
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        # As with an engine, others have their turn meanwhile.
        await asyncio.sleep(0)
        ops = cast("Sequence[Op[Any]]", request.ops)
        return tuple([self.worker.execute(op) for op in ops])
