"""Training sessions that take gradients, of tiny models and without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.gradients import GradientForm, GradientResult, LossKind, LossSpec, LossTarget
from mlx_parallm.types.training import (
    ChoiceInput,
    Distribution,
    TrainableSpec,
    TrainingInput,
)
from mlx_parallm.worker.generation.row_selection import install_row_selection
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, product_dtype
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.training.gradients.forwards import GradientJob
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.session import TrainingSession
from mlx_parallm.worker.training.trained_decoder import TrainedDecoder
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import GradientForward, OpenTraining

MODEL, SESSION = "model", "session"
POOL_BYTES = 1 << 20
#: ``SPREAD``: standard deviation of parameters, so that both factors have a gradient.
SPREAD = 0.05
Rows = tuple[Sequence[TrainingInput], Sequence[LossTarget]]


def trained_decoder(model: Any, vocab_size: int, dtype: str = "float32") -> TrainedDecoder:
    """Return a decoder as sessions get it."""
    context = AdapterContext()
    layers = AdaptedLayers(model, product_dtype(dtype), context)
    selector = install_row_selection(model, vocab_size)
    return TrainedDecoder(StockModel(model, selector, context, layers, max_model_len=512))


class GradientSession:
    """A session of a model, and the gradients that its ops give.

    Attributes:
        session: the session.
    """

    def __init__(
        self,
        model: TrainedModel,
        samples: Sequence[TrainingInput],
        *,
        pool: PrefixPool | None = None,
        **spec: Any,
    ) -> None:
        """Open a session whose parameters are random."""
        op = OpenTraining(
            model=MODEL,
            session=SESSION,
            spec=TrainableSpec(**{"rank": 4, "trains_first": True, **spec}),
            distribution=Distribution.RADEMACHER,
            samples=samples,
            takes_gradients=True,
        )
        self.session = TrainingSession(model, op, pool)
        noise = mx.random.normal(self.theta.shape, key=mx.random.key(1))
        self.theta = self.theta + SPREAD * noise

    @property
    def theta(self) -> mx.array:
        return self.session.trainable.theta

    @theta.setter
    def theta(self, theta: mx.array) -> None:
        self.session.set_parameters(theta)

    def forward(
        self, loss: LossSpec, rows: Rows, divisor: float = 1.0, *, staged: bool = False
    ) -> GradientResult:
        """Add the gradient of rows to the session's; in stages if asked for."""
        job = self.begin(loss, rows, divisor)
        assert not staged or self.session.gradients.form is GradientForm.STAGED
        while staged and job.num_stages > 1:
            job.advance()
        return job.wait()

    def count_stages(self, loss: LossSpec, rows: Rows) -> int:
        """Return how many stages the gradient of rows has."""
        job, count = self.begin(loss, rows), 1
        while job.num_stages > 1:
            job.advance()
            count += 1
        return count

    def begin(self, loss: LossSpec, rows: Rows, divisor: float = 1.0) -> GradientJob:
        """Return the gradient of rows, which is added to the session's once it is computed."""
        inputs, targets = rows
        op = GradientForward(
            model=MODEL,
            session=SESSION,
            inputs=inputs,
            loss=loss,
            targets=targets,
            divisor=divisor,
        )
        return self.session.gradients.begin(op)

    def gradient(self, loss: LossSpec, rows: Rows, *, staged: bool = False) -> np.ndarray:
        """Return the gradient of the rows' losses, float32 ``[P]``."""
        self.session.gradients.drop()
        self.forward(loss, rows, staged=staged)
        assert self.session.gradients.sum is not None
        return np.array(self.session.gradients.sum)

    def error(self, loss: LossSpec, rows: Rows, step: float) -> float:
        """Return by which share a central difference differs from the gradient's.

        Its direction is half the gradient's and half a random one.
        """
        gradient, before = self.gradient(loss, rows), self.theta
        noise = np.random.default_rng(3).standard_normal(len(gradient))
        direction = gradient / np.linalg.norm(gradient) + noise / np.linalg.norm(noise)
        losses: list[float] = []
        for sign in (1, -1):
            self.theta = before + mx.array((sign * step * direction).astype(np.float32))
            losses.append(float(self.forward(loss, rows).losses.sum()))
        self.theta = before
        expected = float(gradient @ direction)
        return abs((losses[0] - losses[1]) / (2 * step) - expected) / abs(expected)


def choice_rows(kind: LossKind, vocab_size: int, count: int = 3) -> Rows:
    """Return rows of random tokens for a loss of decoders."""
    rng = np.random.default_rng(0)

    def draw(size: int) -> tuple[int, ...]:
        return tuple(map(int, rng.integers(1, vocab_size, size)))

    inputs: list[TrainingInput] = []
    targets: list[LossTarget] = []
    for row in range(count):
        prompt, long, short = draw(5 + row), draw(4), draw(3)
        match kind:
            case LossKind.DPO:
                inputs.append(ChoiceInput(prompt, (long, short)))
                targets.append(LossTarget(reference=(-22.0, -19.0 + row)))
            case LossKind.CROSS_ENTROPY:
                inputs.append(ChoiceInput(prompt, ((3,), (7,), (5 + row,))))
                targets.append(LossTarget(label=row % 3))
            case LossKind.POLICY:
                inputs.append(ChoiceInput(prompt, (long,), by_token=True))
                logprobs = tuple(float(each) for each in rng.normal(-np.log(vocab_size), 0.3, 4))
                reference = tuple(each - 0.1 for each in logprobs)
                targets.append(
                    LossTarget(logprobs=logprobs, reference=reference, advantage=1.0 - row)
                )
            case _:
                inputs.append(ChoiceInput(prompt, (long,), weights=((1.0, -0.5, 0.0, 2.0),)))
                targets.append(LossTarget(weight=1.0 + row))
    return inputs, targets
