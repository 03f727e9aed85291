"""Losses, gradients and steps against those of torch (scripts/golden_losses.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.model_task import decoder_plan, decoder_task
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.gradients import (
    LossKind,
    LossSpec,
    LossTarget,
    OptimiserKind,
    OptimiserSettings,
)
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import ChoiceInput, TrainingInput
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.pooling.decoder_runner import DecoderRunner
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.training.gradients.optimiser import Optimiser
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import ApplyGradient
from mlx_parallm.worker.weights.loader import load_model
from tests.encoder_folders import write_golden
from tests.golden_weights import golden_adapter_weight
from tests.gradient_sessions import MODEL, SESSION, GradientSession, Rows, trained_decoder

GOLDEN = Path(__file__).parents[1] / "golden" / "losses"
#: ``ATOL``: for gradients, relative to their largest number if that is above 1.
ATOL = 1e-5


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def model_of(folder: Path, golden: dict[str, Any]) -> TrainedModel:
    path = write_golden(folder, golden)
    (architecture,) = golden["config"]["architectures"]
    if "CausalLM" in architecture:
        return trained_decoder(load_model(ModelConfig(), path).model, 99)
    if "Bert" in architecture:
        return EncoderRunner(load_encoder(path), VectorSpec()).adapters
    plan = decoder_plan(decoder_task(golden["config"], ()), golden["config"])
    return DecoderRunner(open_decoder(ModelConfig(), path, plan), plan, VectorSpec()).adapters


def rows_of(name: str, golden: dict[str, Any]) -> tuple[LossSpec, Rows]:
    inputs: list[TrainingInput] = []
    targets: list[LossTarget] = []
    for row, (prompt, chosen, rejected) in enumerate(golden["pairs"]):
        if name == "dpo":
            inputs.append(ChoiceInput(tuple(prompt), (tuple(chosen), tuple(rejected))))
            targets.append(LossTarget(reference=tuple(golden["reference"][row])))
        elif name == "policy":
            inputs.append(ChoiceInput(tuple(prompt), (tuple(chosen),), by_token=True))
            known = tuple(golden["old"][row]), tuple(golden["reference"][row])
            advantage = golden["advantages"][row]
            targets.append(LossTarget(logprobs=known[0], reference=known[1], advantage=advantage))
        else:
            texts = (tuple(prompt + each) for each in (chosen, rejected))
            inputs += [PoolingInput(text, "classify") for text in texts]
            targets.append(LossTarget(margin=golden["wanted"][row]))
    return spec_of(name, golden), (inputs, targets)


def spec_of(name: str, golden: dict[str, Any]) -> LossSpec:
    if name == "dpo":
        return LossSpec(kind=LossKind.DPO, beta=golden["beta"])
    if name == "policy":
        low, high = golden["clip"]
        return LossSpec(kind=LossKind.POLICY, clip_low=low, clip_high=high, kl=golden["kl"])
    return LossSpec(kind=LossKind.PAIRWISE, centring=golden["centring"])


def weights_of(golden: dict[str, Any], path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the second factors of a layer, ``[r, n]`` each."""
    shapes = golden["adapter"].items()
    return tensors_of({name: golden_adapter_weight(name, shape) for name, shape in shapes}, path)


def tensors_of(tensors: dict[str, Any], path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return PEFT's tensors of a layer as factors ``[r, n]``."""
    a, b = (
        next(np.array(each) for name, each in tensors.items() if f"{path}.{part}." in name)
        for part in ("lora_A", "lora_B")
    )
    return a, b.T


def session_of(model: TrainedModel, golden: dict[str, Any], rows: Rows) -> GradientSession:
    targets = tuple({name.split(".lora_")[0].split(".")[-1] for name in golden["adapter"]})
    session = GradientSession(
        model, rows[0][:2], targets=targets, rank=golden["rank"], alpha=golden["alpha"]
    )
    parts = [
        factor.reshape(-1)
        for layer in session.session.trainable.layers
        for factor in weights_of(golden, layer.path)
    ]
    session.theta = mx.array(np.concatenate(parts))
    return session


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", ["dpo", "policy", "pairwise_bert", "pairwise_qwen3"])
def test_losses_and_gradients_are_those_of_torch(tmp_path: Path, name: str, staged: bool) -> None:
    golden = read(name)
    spec, rows = rows_of(name, golden)
    session = session_of(model_of(tmp_path, golden), golden, rows)
    result = session.forward(spec, rows, float(len(rows[1])), staged=staged)
    np.testing.assert_allclose(result.losses, golden["losses"], atol=ATOL, rtol=ATOL)
    if "margins" in golden:
        np.testing.assert_allclose(result.facts["margins"], golden["margins"], atol=ATOL)
    gradient = session.session.gradients.sum
    assert gradient is not None
    for path, stack in session.session.trainable.stacks(gradient[None]).items():
        expected = tensors_of(golden["gradients"], path)
        for own, other in zip((stack.a[0], stack.b[0]), expected, strict=True):
            np.testing.assert_allclose(own, other, atol=ATOL * max(1.0, np.abs(other).max()))


@pytest.mark.parametrize("case", range(4))
def test_steps_are_those_of_torch(case: int) -> None:
    golden = read("optimisers")
    chosen = golden["cases"][case]
    own = chosen["settings"] | {"kind": OptimiserKind(chosen["settings"]["kind"])}
    settings = OptimiserSettings(betas=tuple(golden["betas"]), epsilon=golden["epsilon"], **own)
    optimiser = Optimiser(16)
    theta = mx.array(golden_adapter_weight("theta", (16,)))
    for number, (gradient, step) in enumerate(
        zip(golden["gradients"], chosen["steps"], strict=True), 1
    ):
        op = ApplyGradient(
            model=MODEL,
            session=SESSION,
            number=number,
            learning_rate=golden["learning_rate"],
            settings=settings,
        )
        theta, norm = optimiser.step(theta, mx.array(gradient), op)
        np.testing.assert_allclose(np.array(theta), step["theta"], atol=1e-6)
        assert norm == pytest.approx(step["norm"], rel=1e-5)
