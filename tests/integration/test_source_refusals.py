"""Requests and settings that encoder-decoders do not take are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_seq2seq import make_seq2seq
from mlx_parallm.config import EngineConfig, ModelConfig, SpeculativeConfig
from mlx_parallm.types.errors import ConfigError, InvalidRequestError
from mlx_parallm.types.training import Distribution, TrainableSpec
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.load.loading import GenerationLoader
from mlx_parallm.worker.generation.load.plan import GenerationSpec
from mlx_parallm.worker.ops import Allocate, Load
from mlx_parallm.worker.sharding.check import check_shardable
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training.trained_decoder import TrainedDecoder
from mlx_parallm.worker.training_ops import ForgetTraining, OpenTraining
from mlx_parallm.worker.worker import Worker
from tests.frames_model import frames_model, frames_of
from tests.source_batches import BLOCK_SIZE, Batch, Request, frames_source, new_runner, tiny_t5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seq2seq(tmp_path_factory.mktemp("t5") / "model", "tiny-t5")


def load(folder: Path, **settings: Any) -> Worker:
    model = ModelConfig(path=str(folder))
    config = EngineConfig(models=(model,), **settings)
    worker = Worker()
    sessions: Any = lambda stock: TrainingSessions(TrainedDecoder(stock))  # noqa: E731
    worker.install(GenerationSpec, GenerationLoader(make_sessions=sessions))
    worker.execute(Load(model="m", spec=GenerationSpec(config=model, path=folder, settings=config)))
    return worker


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"enable_prompt_embeds": True}, r"--enable-prompt-embeds: .*is an encoder-decoder"),
        (
            {"speculative": SpeculativeConfig(method="draft_model", model="other")},
            r"--speculative-config: .*is an encoder-decoder",
        ),
    ],
)
def test_settings_that_suit_decoders_alone(
    folder: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(folder, **settings)


def test_ranks() -> None:
    model = tiny_t5()
    with pytest.raises(ConfigError, match="an encoder-decoder runs in one process"):
        check_shardable(model.model, model.config, model.path, 2)


def test_training(folder: Path) -> None:
    worker = load(folder)
    worker.execute(Allocate(model="m", num_blocks=200))
    opening = OpenTraining(
        model="m", session="s", spec=TrainableSpec(), distribution=Distribution.GAUSSIAN
    )
    with pytest.raises(InvalidRequestError, match="it is an encoder-decoder"):
        worker.begin(opening)
    # An update or a sleep that follows forgets sessions, of which there are none.
    worker.execute(ForgetTraining(model="m"))


def test_a_run_of_frames_of_several_lengths_is_not_cut_somewhere() -> None:
    batch = Batch(new_runner(frames_model(), ReferenceAttention(BLOCK_SIZE)))
    members = [
        batch.start(Request(frames_source(frames_of(length, seed=length)), (1,)))
        for length in (6, 10)
    ]
    with pytest.raises(AssertionError, match="equal shapes"):
        batch.submit([], stages=(batch.stages(members),))


def test_a_source_that_is_longer_than_its_blocks_is_not_written() -> None:
    batch = Batch(new_runner(frames_model(), ReferenceAttention(BLOCK_SIZE)))
    running = batch.start(Request(frames_source(frames_of(9, seed=1)), (1,)))
    running.source_blocks = running.source_blocks[:-1]
    before = batch.runner.read_blocks(running.source_blocks).wait()
    with pytest.raises(IndexError):
        batch.submit([], stages=(batch.stages([running]),))
    assert batch.runner.read_blocks(running.source_blocks).wait() == before
