"""The log of a session is enough: the same adapter in a fresh process, and the same log again."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.training.records import Example
from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.session_files import LOG
from mlx_parallm.training.settings import MezoSettings
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import TrainableSpec
from mlx_parallm.worker.training_ops import (
    ForgetTraining,
)
from tests.unit.training.worker_sessions import (
    EXAMPLES,
    MODEL,
    WORDS,
    WorkerTrain,
    config_of,
    three_layers,
)

pytestmark = pytest.mark.slow

NUM_STEPS, BATCH, NUM_EXAMPLES = 1000, 16, 1024
REPLAY = """
import asyncio, pathlib, sys
from mlx_parallm.process_setup.device_process import prepare_device_process
prepare_device_process()
from mlx_parallm.training.service import TrainingService
from tests.unit.training.worker_sessions import WorkerTrain
train = WorkerTrain(pathlib.Path(sys.argv[3]))
train.load(pathlib.Path(sys.argv[2]))
async def replay():
    service = TrainingService(pathlib.Path(sys.argv[1]), train)
    service.start()
    (session,) = service.all()
    for step in map(int, sys.argv[4:]):
        print((await session.weights(step)).digest)
    await service.stop()
asyncio.run(replay())
"""


async def test_a_fresh_process_rebuilds_every_adapter_of_1000_steps(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [
        Example(
            PoolingInput((row // 80 + 5, row % 80 + 5, 4), "mlm", places=(2,), candidates=WORDS),
            draw.randrange(2),
        )
        for row in range(NUM_EXAMPLES)
    ]
    train = WorkerTrain(tmp_path / "model")
    folder = three_layers(tmp_path / "deeper")
    train.load(folder)
    service = TrainingService(tmp_path / "sessions", train)
    service.start()
    top = TrainableSpec(targets=("query", "value"), top=1, rank=2)
    session = await service.create(config_of(trainable=top, batch_size=BATCH), rows)
    digests: dict[int, str] = {0: (await session.weights()).digest}
    for step in range(1, NUM_STEPS + 1):
        await session.step()
        if step in (1, 500, NUM_STEPS):
            digests[step] = (await session.weights()).digest
    # The share of hits is 1 - N / (steps * B).
    assert session.costs.lookups == NUM_STEPS * BATCH
    assert session.costs.hits == NUM_STEPS * BATCH - NUM_EXAMPLES
    assert session.costs.hits / session.costs.lookups >= 0.93
    await service.stop()
    log = tmp_path / "sessions" / session.config.id / LOG
    assert log.stat().st_size == NUM_STEPS * (8 + 4)
    paths = [tmp_path / "sessions", folder, tmp_path / "other"]
    replayed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", REPLAY, *map(str, (*paths, *digests))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert replayed.stdout.split() == list(digests.values())
    assert len(set(digests.values())) == 4


async def test_a_rerun_under_other_traffic_has_the_same_log(tmp_path: Path) -> None:
    draw = random.Random(1)
    train = WorkerTrain(tmp_path / "model")
    service = TrainingService(tmp_path / "sessions", train)
    service.start()
    directions = MezoSettings(num_directions=3)
    quiet = await service.create(config_of(estimator=directions), EXAMPLES)
    compared = draw.sample(range(101), 10)
    before: dict[int, str] = {}
    for step in range(101):
        if step in compared:
            before[step] = (await quiet.weights()).digest
        if step < 100:
            await quiet.step()
    again = await service.create(config_of(estimator=directions), EXAMPLES)
    other = await service.create(config_of(seed=11), EXAMPLES)
    for _ in range(100):
        match draw.randrange(5):
            case 0:
                await other.step()
            case 1:
                await again.evaluate(EXAMPLES[:3])
            case 2:
                train.execute(ForgetTraining(model=MODEL))
            case 3:
                train.load(train.folder)
            case _:
                pass
        await again.step()
    assert again.files.log() == quiet.files.log()
    assert len(again.files.log()) == 100 * (8 + 4 * 3)
    for step in compared:
        assert (await again.weights(step)).digest == before[step]
    await service.stop()


async def test_a_base_has_the_same_content_during_and_after_a_session(tmp_path: Path) -> None:
    train = WorkerTrain(tmp_path / "model")
    service = TrainingService(tmp_path / "sessions", train)
    service.start()
    session = await service.create(config_of(), EXAMPLES)
    contents: set[str] = set()
    for _ in range(3):
        contents.add((await session.open()).base)
        await session.step()
        # The next session hashes the weights again.
        train.execute(ForgetTraining(model=MODEL))
    contents.add((await (await service.create(config_of(), EXAMPLES)).open()).base)
    assert len(contents) == 1
    await service.stop()
