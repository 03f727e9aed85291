"""The parts of examples/grpo, without a server."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn

from examples.grpo.plot import plot_run
from examples.grpo.task import WORDINGS, Problem, problems, reward
from examples.grpo.trainer import (
    Settings,
    Trainer,
    TrainingSample,
    group_advantages,
    make_batch,
)
from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.client import encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER

PROMPT = (50, 51, 52, 53)


def test_problems_are_answered_by_their_sum_and_held_out_ones_are_others() -> None:
    trained, held_out = (problems(Random(1), 80, held_out=held) for held in (False, True))
    assert not {task.answer for task in trained} & {task.answer for task in held_out}
    for problem in trained + held_out:
        assert reward(f"so it is {problem.answer}.", problem) == 1
        assert reward(f"{problem.answer} or {problem.answer + 1}", problem) == 0
    assert reward("I do not know.", Problem("?", 7)) == 0
    assert len({task.question for task in trained}) > len(WORDINGS)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=20))
def test_advantages_are_centred_and_ordered(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-9)
    if len(set(rewards)) == 1:
        assert advantages == [0.0] * len(rewards)
    else:
        assert np.std(advantages) == pytest.approx(1, abs=1e-3)
        assert np.argsort(advantages, kind="stable").tolist() == (
            np.argsort(rewards, kind="stable").tolist()
        )


def test_only_completion_tokens_count() -> None:
    batch = make_batch(
        [
            TrainingSample([1, 2, 3], [4, 5], [-0.5, -0.25], 1.0),
            TrainingSample([1], [6], [-1.0], -2.0),
        ]
    )
    assert batch["tokens"].shape == (2, 8)
    assert batch["tokens"][0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    # Entry i is about token i + 1.
    assert batch["mask"].tolist() == [[0, 0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    assert batch["logprobs"][0].tolist() == [0, 0, -0.5, -0.25, 0, 0, 0]
    assert batch["advantages"].tolist() == [[1.0], [-2.0]]


def logprobs(trainer: Trainer, token_ids: list[int]) -> list[float]:
    values = nn.log_softmax(trainer.model(mx.array([[*PROMPT, *token_ids]]))[0], axis=-1)
    start = len(PROMPT) - 1
    return [values[start + place, token_id].item() for place, token_id in enumerate(token_ids)]  # type: ignore[misc]


def rewarded(trainer: Trainer) -> list[TrainingSample]:
    """Return a good and a bad sample, as the trainer's own model would have sampled them."""
    return [
        TrainingSample(PROMPT, ids, logprobs(trainer, ids), advantage)
        for ids, advantage in (([60, 61, 62], 1.0), ([70, 71], -1.0))
    ]


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_an_update_makes_good_samples_likelier(kl: float) -> None:
    trainer = Trainer(DEMO_FOLDER, Settings(rank=4, kl=kl))
    good, bad = rewarded(trainer)
    measured = trainer.update([good, bad, TrainingSample(PROMPT, [9], [-1.0], 0.0)])
    assert measured["mismatch"] < 1e-4
    assert measured["clipped"] == 0
    assert sum(logprobs(trainer, [60, 61, 62])) > sum(good.logprobs)
    assert sum(logprobs(trainer, [70, 71])) < sum(bad.logprobs)


def test_what_is_beyond_the_clip_has_no_gradient() -> None:
    trainer = Trainer(DEMO_FOLDER, Settings(rank=4))
    # The policy has moved from the sampling one, in the direction of the reward.
    samples = [
        TrainingSample(
            sample.prompt_ids, sample.token_ids, [p - step for p in sample.logprobs], advantage
        )
        for sample, step, advantage in zip(rewarded(trainer), (0.5, -0.5), (1.0, -1.0), strict=True)
    ]
    measured = trainer.update(samples)
    assert measured["clipped"] == 1
    assert measured["grad_norm"] == 0


def test_the_distance_from_the_base_model_pulls_back() -> None:
    trainer = Trainer(DEMO_FOLDER, Settings(rank=4, kl=1.0, learning_rate=1e-2))
    base = logprobs(trainer, [60, 61, 62])
    trainer.update(rewarded(trainer))
    moved = logprobs(trainer, [60, 61, 62])
    # With so small a ratio and advantage, nothing is left of the reward.
    for _ in range(10):
        trainer.update([TrainingSample(PROMPT, [60, 61, 62], moved, 1e-6)])
    back = logprobs(trainer, [60, 61, 62])
    assert abs(sum(back) - sum(base)) < abs(sum(moved) - sum(base)) / 2


def test_the_adapter_is_one_that_the_server_reads() -> None:
    trainer = Trainer(DEMO_FOLDER, Settings(rank=4))
    trainer.update(rewarded(trainer))
    tensors, config = trainer.adapter()
    actual = read_safetensors(encode_safetensors(tensors), param="file")
    weights = read_adapter(config, actual, param="file")
    assert weights.rank == 4
    # Each of six blocks has seven linear layers.
    assert len(tensors) == 2 * 7 * 6


def test_nothing_to_learn_from_is_no_update() -> None:
    trainer = Trainer(DEMO_FOLDER, Settings(rank=4))
    assert trainer.update([TrainingSample(PROMPT, [9], [-1.0], 0.0)]) == {}


def test_the_image_has_both_lines() -> None:
    steps: list[Any] = [
        SimpleNamespace(reward=number / 9, evaluation=0.5 if number % 3 == 0 else None, elapsed_s=9)
        for number in range(10)
    ]
    root = ET.fromstring(plot_run(steps))
    name = "{http://www.w3.org/2000/svg}"
    assert [len(line.attrib["points"].split()) for line in root.iter(f"{name}polyline")][-2:] == [
        10,
        4,
    ]
    assert ET.fromstring(plot_run([])) is not None
