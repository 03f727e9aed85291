"""Training sessions as ops of the worker: a model learns by forward passes alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.weights import AdapterWeights, split_adapter
from mlx_parallm.config import ModelConfig
from mlx_parallm.types.errors import ConflictError, InvalidRequestError, SessionLostError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import Distribution, Segment, Step, TrainableSpec
from mlx_parallm.worker.ops import (
    AddAdapter,
    Load,
    PoolBatch,
    tensor_ops,
)
from mlx_parallm.worker.pooling.loading import PoolingLoader
from mlx_parallm.worker.pooling.plan import PoolingSpec
from mlx_parallm.worker.training.frozen_prefix import FrozenPrefix
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    Materialise,
    MeasureInputs,
    OpenTraining,
    PairForward,
)
from mlx_parallm.worker.worker import Worker
from tests.encoder_folders import golden_arrays, read_golden, write_encoder, write_golden

MODEL, SESSION = "model", "session"
SPEC = TrainableSpec(targets=("query", "value"), layers=(1,), rank=2, alpha=4.0)
WORDS = (3, 9)
#: ``EXAMPLES``: a text, whose last token is masked, and the right one of the two words.
EXAMPLES = tuple(
    (PoolingInput((*text, 4), "mlm", places=(len(text),), candidates=WORDS), label)
    for text, label in (((5, 6, 7), 0), ((8, 9), 1), ((5, 7, 6, 6), 0), ((9, 10, 8), 1))
)
INPUTS = [item for item, _ in EXAMPLES]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    worker = Worker()
    worker.install(PoolingSpec, PoolingLoader(TrainingSessions))
    folder = write_golden(tmp_path, read_golden("bert_masked_lm"))
    spec = PoolingSpec(
        config=ModelConfig(path=str(folder)), path=folder, task="auto", chosen=(), free_bytes=None
    )
    worker.execute(Load(model=MODEL, spec=spec))
    return worker


@pytest.fixture
def session(worker: Worker) -> Worker:
    open_session(worker)
    return worker


def open_session(worker: Worker, spec: TrainableSpec = SPEC, **options: Any) -> Any:
    return worker.execute(
        OpenTraining(
            model=MODEL,
            session=SESSION,
            spec=spec,
            distribution=options.pop("distribution", Distribution.RADEMACHER),
            **options,
        )
    )


def losses(results: Sequence[np.ndarray]) -> list[float]:
    """Return the cross entropy of the right word for each result, ``[1, 2]``."""
    labels = [label for _, label in EXAMPLES] * (len(results) // len(EXAMPLES))
    return [
        float(np.logaddexp(*result[0]) - result[0, label])
        for result, label in zip(results, labels, strict=True)
    ]


def forward(worker: Worker, seed: int, epsilon: float = 1e-2) -> tuple[float, float]:
    """Return the mean losses of both signs of one direction."""
    rows = tuple(range(len(INPUTS)))
    op = PairForward(
        model=MODEL,
        session=SESSION,
        inputs=INPUTS,
        segments=(Segment(0, 1, rows), Segment(0, -1, rows)),
        seed=seed,
        num_directions=1,
        epsilon=epsilon,
    )
    every = losses(worker.execute(op).results)
    return float(np.mean(every[: len(rows)])), float(np.mean(every[len(rows) :]))


def train(worker: Worker, count: int, rate: float) -> list[Step]:
    """Train by MeZO with the sign of each projected gradient; return the steps."""
    steps: list[Step] = []
    for seed in range(count):
        plus, minus = forward(worker, seed)
        steps.append(Step(seed, [rate * float(np.sign(plus - minus))]))
        worker.execute(ApplySteps(model=MODEL, session=SESSION, steps=steps[-1:]))
    return steps


def test_forward_passes_alone_reduce_the_loss(session: Worker) -> None:
    before = sum(forward(session, 0, epsilon=0.0)) / 2
    train(session, 150, 2e-2)
    after = sum(forward(session, 0, epsilon=0.0)) / 2
    assert after < 0.7 * before


def test_the_log_gives_the_same_bits_at_every_step(session: Worker) -> None:
    adapters: list[str] = []
    steps: list[Step] = []
    for _ in range(3):
        steps += train(session, 2, 1e-2)
        adapters.append(session.execute(Materialise(model=MODEL, session=SESSION)).digest)
    assert len(set(adapters)) == 3
    session.execute(CloseTraining(model=MODEL, session=SESSION))
    open_session(session)
    for count, digest in zip((2, 4, 6), adapters, strict=True):
        op = Materialise(model=MODEL, session=SESSION, steps=steps[:count])
        assert session.execute(op).digest == digest


@pytest.mark.parametrize(
    ("num_steps", "num_directions"), [(0, 1), (1, 1), (16, 1), (17, 1), (33, 1), (1, 40), (7, 3)]
)
def test_a_replay_has_stages_between_which_streams_have_their_turn(
    session: Worker, num_steps: int, num_directions: int
) -> None:
    steps = [Step(seed, [1e-3 * seed] * num_directions) for seed in range(num_steps)]
    expected = session.execute(Materialise(model=MODEL, session=SESSION, steps=steps)).digest
    before = session.execute(Materialise(model=MODEL, session=SESSION)).digest
    apply = session.begin(ApplySteps(model=MODEL, session=SESSION, steps=steps))
    num_stages = apply.num_stages
    assert num_stages == max(1, math.ceil(num_steps * num_directions / 16))
    for left in range(num_stages - 1, 0, -1):
        apply.advance()
        assert apply.num_stages == left
        # A replay that is given up midway has changed nothing.
        assert session.execute(Materialise(model=MODEL, session=SESSION)).digest == before
    apply.wait()
    assert session.execute(Materialise(model=MODEL, session=SESSION)).digest == expected


def test_texts_that_are_not_kept_have_a_stage_each(session: Worker) -> None:
    rows = tuple(range(len(INPUTS)))
    segments = (Segment(0, 1, rows), Segment(0, -1, rows))
    op = PairForward(
        model=MODEL,
        session=SESSION,
        inputs=INPUTS,
        segments=segments,
        seed=1,
        num_directions=1,
        epsilon=1e-2,
    )
    job = session.begin(op)
    stages: list[int] = []
    while job.num_stages > 1:
        stages.append(job.num_stages)
        job.advance()
    assert stages == [5, 4, 3, 2], "the last layer and the head are the last stage"
    first, again = job.wait(), session.execute(op)
    assert all(map(np.array_equal, first.results, again.results))
    assert (first.hits, again.hits) == (0, len(INPUTS))


def test_what_was_trained_can_be_served(session: Worker) -> None:
    train(session, 20, 5e-2)
    adapter: AdapterWeights = session.execute(Materialise(model=MODEL, session=SESSION))
    layout, host = split_adapter(adapter)
    for op in tensor_ops(MODEL, "upload", host):
        session.execute(op)
    session.execute(AddAdapter(model=MODEL, content="a", layout=layout, handle="upload"))
    named = [
        PoolingInput(i.token_ids, i.task, places=i.places, candidates=i.candidates, adapter="a")
        for i in INPUTS
    ]
    served = losses(session.execute(PoolBatch(model=MODEL, inputs=named, slots={"a": 1})))
    trained = sum(forward(session, 0, epsilon=0.0)) / 2
    assert np.mean(served) == pytest.approx(trained, abs=1e-5)


def test_a_session_changes_no_bit_of_the_model(worker: Worker) -> None:
    batch = PoolBatch(model=MODEL, inputs=INPUTS, slots={})
    digests: list[str] = []
    for act in (lambda: None, lambda: open_session(worker), lambda: train(worker, 3, 1e-1)):
        act()
        results = worker.execute(batch)
        digests.append(hashlib.sha256(b"".join(r.tobytes() for r in results)).hexdigest())
    worker.execute(CloseTraining(model=MODEL, session=SESSION))
    assert len(set(digests)) == 1


def test_a_rerun_gives_the_same_log_whatever_is_kept(worker: Worker) -> None:
    logs: list[list[float]] = []
    for _ in range(2):
        open_session(worker)
        logs.append([c for step in train(worker, 10, 1e-2) for c in step.coefficients])
        logs.append([loss for seed in range(3) for loss in forward(worker, seed)])
        worker.execute(CloseTraining(model=MODEL, session=SESSION))
    assert logs[0] == logs[2]
    assert logs[1] == logs[3]


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (TrainableSpec(targets=("query", "nothing")), "trainable.targets"),
        (TrainableSpec(targets=("LayerNorm",)), "trainable.targets"),
        (TrainableSpec(targets=("query",), layers=(2,)), "trainable.layers"),
        (TrainableSpec(targets=("query",), layers=(-1,)), "trainable.layers"),
    ],
)
def test_what_cannot_be_trained_is_refused(worker: Worker, spec: TrainableSpec, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        open_session(worker, spec)
    assert caught.value.param == param


def test_facts_about_a_session(worker: Worker) -> None:
    info = open_session(worker)
    assert [path.rpartition(".")[2] for path in info.paths] == ["query", "value"]
    assert info.first_layer == 1
    everything = open_session(worker, TrainableSpec(targets=("query",), rank=2, trains_first=True))
    assert everything.first_layer == 0
    assert everything.num_parameters == 2 * info.num_parameters
    assert (info.num_layers, info.keeps_prefix, everything.keeps_prefix) == (2, True, False)


def measured(worker: Worker, spec: TrainableSpec = SPEC) -> dict[str, np.ndarray]:
    op = MeasureInputs(model=MODEL, session=SESSION, spec=spec, inputs=INPUTS)
    return worker.execute(op)


def test_first_factors_of_activations_are_those_of_the_adapter(worker: Worker) -> None:
    batch = PoolBatch(model=MODEL, inputs=INPUTS, slots={})
    before = worker.execute(batch)
    factors = measured(worker)
    assert all(map(np.array_equal, worker.execute(batch), before))
    info = open_session(worker, factors=factors)
    assert set(factors) == set(info.paths)
    adapter: AdapterWeights = worker.execute(Materialise(model=MODEL, session=SESSION))
    for path, change in adapter.modules.items():
        np.testing.assert_array_equal(np.array(to_mlx(change.a)), factors[path])
    # Query and value of a layer have the same inputs.
    query, value = (factors[path] for path in sorted(factors))
    np.testing.assert_array_equal(query, value)
    losses_before = sum(forward(worker, 0, epsilon=0.0)) / 2
    train(worker, 100, 2e-2)
    assert sum(forward(worker, 0, epsilon=0.0)) / 2 < 0.7 * losses_before


def test_first_factors_of_activations_may_be_trained(worker: Worker) -> None:
    spec = replace(SPEC, trains_first=True)
    open_session(worker, spec, factors=measured(worker, spec))
    steps = train(worker, 3, 1e-2)
    digest = worker.execute(Materialise(model=MODEL, session=SESSION)).digest
    replay = Materialise(model=MODEL, session=SESSION, steps=steps)
    assert worker.execute(replay).digest == digest


def test_factors_of_other_layers_are_refused(worker: Worker) -> None:
    factors = measured(worker)
    for others in ({}, {path: array[:1] for path, array in factors.items()}):
        with pytest.raises(ConflictError, match="other layers"):
            open_session(worker, factors=others)


def test_the_weights_are_told_by_their_digest(worker: Worker, tmp_path: Path) -> None:
    base = open_session(worker, samples=INPUTS[:2]).base
    assert open_session(worker, SPEC).base == base
    golden = read_golden("bert_masked_lm")
    weights = golden_arrays(golden)
    name = min(weights)
    folder = write_encoder(
        tmp_path / "other", golden["config"], weights | {name: weights[name] + 1e-3}
    )
    spec = PoolingSpec(
        config=ModelConfig(path=str(folder)), path=folder, task="auto", chosen=(), free_bytes=None
    )
    worker.execute(Load(model=MODEL, spec=spec))
    assert open_session(worker).base != base


def test_a_prefix_is_kept_only_if_that_changes_no_bit(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_session(worker, samples=INPUTS).keeps_prefix
    exact = FrozenPrefix.computed
    monkeypatch.setattr(FrozenPrefix, "computed", lambda *args: exact(*args) + 1e-3)
    assert not open_session(worker, samples=INPUTS).keeps_prefix


def test_a_session_is_lost_with_its_model(session: Worker) -> None:
    session.execute(CloseTraining(model=MODEL, session=SESSION))
    with pytest.raises(SessionLostError):
        forward(session, 0)


def test_what_was_found_is_counted(session: Worker) -> None:
    rows = tuple(range(len(INPUTS)))
    op = PairForward(
        model=MODEL,
        session=SESSION,
        inputs=INPUTS,
        segments=(Segment(0, 1, rows), Segment(0, -1, rows)),
        seed=1,
        num_directions=1,
        epsilon=1e-2,
    )
    counts = [session.execute(op) for _ in range(2)]
    assert [(each.lookups, each.hits) for each in counts] == [(4, 0), (4, 4)]
    tokens = sum(len(item.token_ids) for item in INPUTS)
    assert [each.frozen_tokens for each in counts] == [tokens, 0]
