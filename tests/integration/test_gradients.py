"""Gradients of every loss through served models: central differences, mlx_lm, stages and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.errors import ConflictError, InvalidRequestError
from mlx_parallm.types.gradients import (
    GradientForm,
    LossKind,
    LossSpec,
    LossTarget,
    OptimiserSettings,
)
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import ChoiceInput
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import ApplyGradient
from tests.builders.architectures.configs import VOCAB_SIZE, config_of
from tests.builders.architectures.trial import build
from tests.encoder_folders import read_golden, write_golden
from tests.gradient_sessions import (
    MODEL,
    POOL_BYTES,
    SESSION,
    GradientSession,
    Rows,
    choice_rows,
    trained_decoder,
)

slow = pytest.mark.slow
#: ``STEPS``: sizes of central differences. The smaller one changes the expert of no token.
STEPS = (1e-3, 1e-4)
OF_DECODERS = (LossKind.LIKELIHOOD, LossKind.CROSS_ENTROPY, LossKind.DPO, LossKind.POLICY)
DECODERS = (
    "llama",
    "qwen3",
    "gemma2",
    "gpt2",
    "phi3",
    "olmo2",
    "glm4",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v2",
    "mamba",
    "gemma3n",
    "afm7",
)
# WHOLE: more than hidden states passes between their layers.
WHOLE = {"gemma3n", "afm7"}
QUICK = {("llama", LossKind.DPO), ("qwen3_moe", LossKind.POLICY), ("gpt2", LossKind.LIKELIHOOD)}
ENCODERS = ("bert", "modernbert", "deberta_v2", "distilbert", "electra", "mpnet", "gte")
ADAM = OptimiserSettings()
TEXTS = ((5, 6, 7, 8), (9, 8, 4), (5, 6, 7, 8, 9, 10), (4, 11, 12, 3))


def spec_of(kind: LossKind) -> LossSpec:
    return LossSpec(kind=kind, kl=0.1, centring=0.1)


def decoder(name: str) -> TrainedModel:
    return trained_decoder(build(config_of(name)), VOCAB_SIZE)


def opened(model: TrainedModel, kind: LossKind = LossKind.DPO, **options: Any) -> GradientSession:
    return GradientSession(model, choice_rows(kind, VOCAB_SIZE)[0][:2], **options)


def encoder(folder: Path, name: str, **changes: list[int]) -> TrainedModel:
    """Return a golden encoder, some of whose weights have another shape."""
    golden = read_golden(name)
    golden["weights"] |= changes
    return EncoderRunner(load_encoder(write_golden(folder, golden)), VectorSpec()).adapters


def words(texts: Sequence[tuple[int, ...]] = TEXTS) -> Rows:
    """Return rows that complete texts by one of two words."""
    inputs = [
        PoolingInput(text, "mlm", places=(len(text) - 1,), candidates=(3, 9)) for text in texts
    ]
    return inputs, [LossTarget(label=row % 2) for row in range(len(texts))]


def is_exact(session: GradientSession, kind: LossKind, rows: Rows) -> bool:
    return any(session.error(spec_of(kind), rows, step) < 0.01 for step in STEPS)


def quick_first(name: str, kind: LossKind) -> Any:
    return pytest.param(name, kind, marks=() if (name, kind) in QUICK else slow)


@pytest.mark.parametrize(
    ("name", "kind"), [quick_first(name, kind) for name in DECODERS for kind in OF_DECODERS]
)
def test_gradients_of_decoders_are_central_differences(name: str, kind: LossKind) -> None:
    session = opened(decoder(name), kind)
    assert is_exact(session, kind, choice_rows(kind, VOCAB_SIZE))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "bert" else slow) for name in ENCODERS]
)
def test_gradients_of_encoders_are_central_differences(tmp_path: Path, name: str) -> None:
    model = encoder(tmp_path, f"{name}_masked_lm")
    session = GradientSession(model, words()[0])
    assert is_exact(session, LossKind.CROSS_ENTROPY, words())
    assert session.session.gradients.form is GradientForm.STAGED


def test_gradients_of_a_trained_head_are_central_differences(tmp_path: Path) -> None:
    inputs = [PoolingInput(text, "classify") for text in TEXTS]
    targets = [LossTarget(label=row % 3) for row in range(len(TEXTS))]
    model = encoder(tmp_path, "bert_sequence")
    session = GradientSession(model, inputs, trains_head=True)
    spec = spec_of(LossKind.CROSS_ENTROPY)
    assert is_exact(session, LossKind.CROSS_ENTROPY, (inputs, targets))
    head = session.session.trainable.num_parameters - 99
    gradient = session.gradient(spec, (inputs, targets))
    assert np.all(gradient[head:] != 0)
    np.testing.assert_array_equal(gradient, session.gradient(spec, (inputs, targets), staged=True))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_bases_have_gradients(bits: int) -> None:
    model = build(config_of("llama"))
    nn.quantize(model, group_size=32, bits=bits)
    session = opened(trained_decoder(model, VOCAB_SIZE))
    assert session.session.gradients.form is GradientForm.STAGED
    assert is_exact(session, LossKind.DPO, choice_rows(LossKind.DPO, VOCAB_SIZE))


@pytest.mark.parametrize("trains_first", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen3", "mamba", "gemma3n") else slow)
        for name in DECODERS
    ],
)
def test_stages_give_the_bits_of_one_graph(name: str, trains_first: bool) -> None:
    session = opened(decoder(name), trains_first=trains_first)
    if name in WHOLE:
        assert session.session.gradients.form is GradientForm.WHOLE
        return
    assert session.session.gradients.form is GradientForm.STAGED
    for kind in OF_DECODERS:
        rows, spec = choice_rows(kind, VOCAB_SIZE), spec_of(kind)
        staged = session.gradient(spec, rows, staged=True)
        np.testing.assert_array_equal(staged, session.gradient(spec, rows))
        assert np.any(staged)


def test_choices_that_may_share_their_prompt_have_rows_of_their_own() -> None:
    session = opened(decoder("llama"))
    (inputs, targets), spec = choice_rows(LossKind.DPO, VOCAB_SIZE), spec_of(LossKind.DPO)
    expected = session.gradient(spec, (inputs, targets))
    shared = [replace(item, shares=True) for item in inputs if isinstance(item, ChoiceInput)]
    for staged in (False, True):
        gradient = session.gradient(spec, (shared, targets), staged=staged)
        np.testing.assert_array_equal(gradient, expected)


def test_layers_with_several_outputs_are_not_trained() -> None:
    paths = opened(decoder("afm7")).session.trainable.paths
    assert {path.rpartition(".")[2] for path in paths} >= {"out_proj", "down_proj"}
    assert not any(path.endswith("qkv_proj") for path in paths)
    with pytest.raises(InvalidRequestError, match="no linear layer 'qkv_proj'; they have mlp"):
        opened(decoder("afm7"), targets=("qkv_proj",))


def test_a_stage_is_a_layer() -> None:
    session = opened(decoder("llama"), top=1)
    inputs, targets = choice_rows(LossKind.DPO, VOCAB_SIZE)
    num_layers = 4
    assert session.count_stages(spec_of(LossKind.DPO), (inputs, targets)) == num_layers + 1 + 1


def mlx_lm_gradients(tokens: np.ndarray, session: GradientSession) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients by mlx_lm's LoRA trainer with the session's parameters."""
    model = build(config_of("qwen3"))
    model.freeze()
    keys = [f"self_attn.{name}" for name in ("q_proj", "v_proj")]
    settings = {"rank": 4, "scale": 4.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), settings)
    stacks = session.session.trainable.stacks(session.theta[None])
    for path, module in model.named_modules():
        if path in stacks:
            module.lora_a, module.lora_b = stacks[path].a[0].T, stacks[path].b[0]
    lengths = mx.array([[1, tokens.shape[1] - 1]] * len(tokens))
    (loss, _), gradients = nn.value_and_grad(model, default_loss)(model, mx.array(tokens), lengths)
    return loss.item(), dict(tree_flatten(gradients))


def test_supervised_gradients_are_those_of_mlx_lm() -> None:
    session = opened(decoder("qwen3"), targets=("q_proj", "v_proj"))
    tokens = np.random.default_rng(1).integers(1, VOCAB_SIZE, (4, 12))
    loss, expected = mlx_lm_gradients(tokens, session)
    inputs = [ChoiceInput((row[0],), (tuple(row[1:]),)) for row in tokens.tolist()]
    rows = inputs, [LossTarget() for _ in inputs]
    result = session.forward(spec_of(LossKind.LIKELIHOOD), rows, tokens.size - len(tokens))
    assert result.losses.sum() / (tokens.size - len(tokens)) == pytest.approx(loss, abs=1e-6)
    gradient = session.session.gradients.sum
    assert gradient is not None
    for path, stack in session.session.trainable.stacks(gradient[None]).items():
        np.testing.assert_allclose(stack.a[0].T, expected[f"{path}.lora_a"], atol=1e-6, rtol=0)
        np.testing.assert_allclose(stack.b[0], expected[f"{path}.lora_b"], atol=1e-6, rtol=0)


def test_kept_states_change_no_bit() -> None:
    model = decoder("llama")
    rows, spec = choice_rows(LossKind.DPO, VOCAB_SIZE, 6), spec_of(LossKind.DPO)
    # One pool keeps everything, and one has room for a single text.
    kept, evicting = PrefixPool(POOL_BYTES), PrefixPool(64 * 4 * 12)
    sessions = [opened(model, pool=pool, top=2) for pool in (kept, evicting, kept)]
    assert all(each.session.prefix.pool is not None for each in sessions)
    gradients = [each.gradient(spec, rows) for each in sessions]
    assert len(kept) == 12 > len(evicting)
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(gradient, gradients[0])
    np.testing.assert_array_equal(sessions[0].gradient(spec, rows, staged=True), gradients[0])
    without = opened(model, top=2).gradient(spec, rows)
    np.testing.assert_allclose(gradients[0], without, atol=1e-6)


def test_micro_batches_are_added_in_their_order() -> None:
    session = opened(decoder("llama"))
    spec = spec_of(LossKind.DPO)
    inputs, targets = choice_rows(LossKind.DPO, VOCAB_SIZE, 4)
    whole = session.gradient(spec, (inputs, targets))
    sums: list[np.ndarray] = []
    for _ in range(2):
        session.session.gradients.drop()
        for part in (slice(0, 1), slice(1, 4)):
            session.forward(spec, (inputs[part], targets[part]))
        assert session.session.gradients.sum is not None
        sums.append(np.array(session.session.gradients.sum))
    np.testing.assert_array_equal(sums[0], sums[1])
    np.testing.assert_allclose(sums[0], whole, rtol=1e-4, atol=1e-6)


def step_of(session: GradientSession, **changes: Any) -> float:
    settings = {"number": 1, "learning_rate": 1e-2, "settings": ADAM} | changes
    return session.session.gradients.apply(ApplyGradient(model=MODEL, session=SESSION, **settings))


def test_steps_go_down() -> None:
    session = opened(decoder("llama"))
    spec, rows = spec_of(LossKind.DPO), choice_rows(LossKind.DPO, VOCAB_SIZE)
    losses: list[float] = []
    for number in range(1, 9):
        losses.append(float(session.forward(spec, rows, 3.0).losses.sum()))
        assert step_of(session, number=number) > 0
    assert losses[-1] < 0.5 * losses[0]


def poison(session: GradientSession) -> None:
    assert session.session.gradients.sum is not None
    session.session.gradients.sum = session.session.gradients.sum.at[0].add(float("nan"))


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (poison, {}),
        (lambda session: None, {"learning_rate": float("inf")}),
        (lambda session: session.session.gradients.drop(), {}),
    ],
    ids=["gradient", "rate", "none"],
)
def test_a_step_that_is_not_finite_changes_nothing(before: Any, changes: dict[str, Any]) -> None:
    session = opened(decoder("llama"))
    rows = choice_rows(LossKind.DPO, VOCAB_SIZE)
    session.forward(spec_of(LossKind.DPO), rows)
    optimiser = session.session.gradients.optimiser
    arrays = [np.array(each) for each in (session.theta, optimiser.first, optimiser.second)]
    before(session)
    with pytest.raises(ConflictError, match="Step 1 was not made"):
        step_of(session, **changes)
    for array, now in zip(arrays, (session.theta, optimiser.first, optimiser.second), strict=True):
        np.testing.assert_array_equal(array, np.array(now))
    session.forward(spec_of(LossKind.DPO), rows)
    assert step_of(session) > 0


NAN = float("nan")
PAIR = ChoiceInput((1, 2), ((3, 4), (5,)))
SAMPLE = ChoiceInput((1, 2), ((3, 4),), by_token=True)


@pytest.mark.parametrize(
    ("kind", "item", "target"),
    [
        (LossKind.LIKELIHOOD, ChoiceInput((1,), ((2,),), weights=((NAN,),)), LossTarget()),
        (LossKind.LIKELIHOOD, ChoiceInput((1,), ((2,),)), LossTarget(weight=NAN)),
        (LossKind.DPO, PAIR, LossTarget()),
        (LossKind.DPO, PAIR, LossTarget(reference=(-1.0, NAN))),
        (LossKind.DPO, SAMPLE, LossTarget(reference=(-1.0, -1.0))),
        (LossKind.PAIRWISE, SAMPLE, LossTarget()),
        (LossKind.POLICY, SAMPLE, LossTarget(logprobs=(-1.0,), reference=(-1.0, -2.0))),
        (LossKind.POLICY, SAMPLE, LossTarget(logprobs=(-1.0, -2.0))),
        (LossKind.POLICY, PAIR, LossTarget(logprobs=(-1.0, -2.0))),
        (
            LossKind.POLICY,
            SAMPLE,
            LossTarget(logprobs=(-1.0, -2.0), reference=(-1.0, -2.0), advantage=NAN),
        ),
    ],
)
def test_rows_that_have_no_loss_are_refused(
    kind: LossKind, item: ChoiceInput, target: LossTarget
) -> None:
    session = opened(decoder("llama"), top=1)
    with pytest.raises(InvalidRequestError, match="The loss cannot be computed"):
        session.forward(spec_of(kind), ([item], [target]))
    assert session.session.gradients.sum is None


def test_models_without_a_gradient_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama")
    forward = model.changed_job

    def stopped(*args: Any, **kwargs: Any) -> Any:
        job = forward(*args, **kwargs)
        job._results = list(map(mx.stop_gradient, job._results))
        return job

    monkeypatch.setattr(model, "changed_job", stopped)
    with pytest.raises(InvalidRequestError, match="This model has no gradient"):
        opened(model)


def test_layers_are_in_training_mode_during_a_gradient_alone() -> None:
    model = build(config_of("qwen3_next"))
    session = opened(trained_decoder(model, VOCAB_SIZE))
    spec, rows = spec_of(LossKind.DPO), choice_rows(LossKind.DPO, VOCAB_SIZE)
    for staged in (False, True):
        modes: list[bool] = []
        with WrappedCalls(model.layers, partial(noting, modes=modes)):
            session.gradient(spec, rows, staged=staged)
        # In stages, each layer is called once more before the gradient goes back through it.
        assert modes == [True] * len(model.layers) * (2 if staged else 1)
        assert not any(module.training for module in model.modules())


def noting(original: Any, *, modes: list[bool]) -> Methods:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modes.append(self.training)
        return original.__call__(self, *args, **kwargs)

    return {"__call__": call}
