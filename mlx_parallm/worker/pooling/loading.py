"""Loads pooling models in parts, and runs ops on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.models.checkpoints.decoders import reads_both_ways
from mlx_parallm.models.checkpoints.encoders import is_encoder
from mlx_parallm.models.checkpoints.model_task import decoder_plan
from mlx_parallm.models.checkpoints.sentence_transformers import (
    VectorSpec,
    read_json,
    read_vector_spec,
    transformer_folder,
)
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.models.loading import open_encoder
from mlx_parallm.numerics.finite import evaluate_weights, scale_modes
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.ops import (
    AddAdapter,
    DropAdapter,
    Load,
    Pending,
    PoolBatch,
    ReadAdapter,
    StageAdapter,
)
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.pooling.decoder_runner import DecoderRunner
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder, EncoderAdapters
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.pooling.plan import PoolingPlan, PoolingSpec
from mlx_parallm.worker.weights.loader import (
    DTYPES,
    CastRule,
    check_dtype,
    parameters_of,
    weight_parts,
)
from mlx_parallm.worker.worker import Device, Loader, Tensors, TrainingSessions, WorkerModel


class PoolingLoader(Loader):
    """Loads pooling models."""

    def __init__(self, make_sessions: Callable[[EncoderAdapters], TrainingSessions]) -> None:
        """``make_sessions`` returns a place for the training sessions of a model."""
        self._make_sessions = make_sessions

    @override
    def begin(self, op: Load, device: Device) -> PendingEncoder:
        del device
        pending = open_runner(op.spec, op.plan)
        pending.make_sessions = self._make_sessions
        return pending


class PendingEncoder(Pending):
    """A model whose weights are read in stages. Implements ``PendingLoad``.

    Attributes:
        num_bytes: size of its weights.
        model: the loaded model; None until ``wait`` has returned.
        make_sessions: returns a place for its training sessions; None: there is none.
    """

    def __init__(
        self, model: Any, folder: Path, finish: Callable[[], AdaptedEncoder], *, is_cast: bool
    ) -> None:
        """``finish`` makes the runner, once all parameters of ``model`` are evaluated."""
        self.model: EncoderModel | None = None
        self.make_sessions: Callable[[EncoderAdapters], TrainingSessions] | None = None
        self._folder = folder
        self._finish = finish
        self._is_cast = is_cast
        arrays = parameters_of(model)
        self.num_bytes = sum(array.nbytes for array in arrays.values())
        self._modes = scale_modes(model)
        self._parts = list(weight_parts(arrays))

    @property
    @override
    def num_stages(self) -> int:
        return len(self._parts) + 1

    def advance(self) -> None:
        """Read the next part of the weights.

        Raises:
            ModelLoadError: a file cannot be read, or a weight is NaN or infinite.
        """
        with load_failures(self._folder):
            evaluate_weights(self._parts.pop(0), self._folder, self._modes)

    def finish(self) -> AdaptedEncoder:
        """Read the remaining parts and return the runner."""
        while self._parts:
            self.advance()
        return self._finish()

    def wait(self) -> PoolingPlan:
        """Return the plan, see ``Pending``; raise as ``advance`` does."""
        with load_failures(self._folder):
            runner = self.finish()
        sessions = None if self.make_sessions is None else self.make_sessions(runner.adapters)
        self.model = EncoderModel(runner, sessions)
        return PoolingPlan(info=runner.info, is_cast=self._is_cast)


class EncoderModel(WorkerModel):
    """A loaded pooling model."""

    def __init__(self, runner: AdaptedEncoder, sessions: TrainingSessions | None = None) -> None:
        self._runner = runner
        self._adapters = AdapterStore(runner.adapters)
        self._sessions = sessions

    @override
    def begin(self, op: Any, tensors: Mapping[str, Tensors]) -> Pending[Any]:
        match op:
            case PoolBatch():
                return self._begin_batch(op)
            case AddAdapter() | StageAdapter() | ReadAdapter() | DropAdapter():
                return self._adapters.begin(op, tensors)
            case _:
                assert self._sessions is not None, f"a pooling model does not know {op}"
                return self._sessions.begin(op)

    def _begin_batch(self, op: PoolBatch) -> Pending[list[np.ndarray]]:
        self._adapters.place({slot: content for content, slot in op.slots.items()})
        return self._runner.begin(op.inputs, op.slots)

    @override
    def recover(self) -> None:
        """Batches put their adapters anew."""
        self._adapters.release()
        if self._sessions is not None:
            self._sessions.recover()

    @override
    def release(self) -> None:
        if self._sessions is not None:
            self._sessions.release()
        self._adapters.release()
        self._runner.release()


def open_runner(spec: PoolingSpec, plan: PoolingPlan | None = None) -> PendingEncoder:
    """Begin to load a pooling model; ``plan`` is that of another worker's load.

    Raises:
        ConfigError: the dtype is unknown.
        ModelLoadError: the model cannot be loaded.
    """
    folder = transformer_folder(spec.path)
    if is_encoder(folder):
        return open_encoder_runner(folder, spec.config.dtype, read_vector_spec(spec.path))
    model_config = read_json(spec.path / "config.json")
    assert spec.task != "auto", "only an encoder's head decides its task"
    decoder = decoder_plan(spec.task, model_config, spec.chosen)
    vectors = read_vector_spec(spec.path, _vectors(model_config))
    rule = CastRule(None if plan is None else plan.is_cast, spec.free_bytes)
    opened = open_decoder(spec.config, spec.path, decoder, rule)
    return PendingEncoder(
        opened.model,
        spec.path,
        lambda: DecoderRunner(opened, decoder, vectors),
        is_cast=opened.is_cast,
    )


def open_encoder_runner(folder: Path, dtype: str, spec: VectorSpec) -> PendingEncoder:
    """Begin to load an encoder; ``dtype`` "auto" is the file's, or float32 on a CPU.

    Raises:
        ConfigError: the dtype is unknown.
        ModelLoadError: the model cannot be loaded.
    """
    check_dtype(dtype)
    wanted = DTYPES.get(dtype)
    if wanted is None and backend_name() == "cpu":
        # On a CPU, float32 is many times faster than 16 bits.
        wanted = mx.float32
    opened = open_encoder(folder, wanted)
    return PendingEncoder(opened.model, folder, lambda: EncoderRunner(opened, spec), is_cast=False)


def load_encoder_runner(folder: Path, dtype: str, spec: VectorSpec) -> AdaptedEncoder:
    """Return the runner of an encoder, with all its weights in memory; see above for errors."""
    return open_encoder_runner(folder, dtype, spec).finish()


def _vectors(config: dict[str, Any]) -> VectorSpec:
    """Return vLLM's default for vectors, where no file of the model describes them."""
    return VectorSpec(poolings=("mean" if reads_both_ways(config) else "last",), normalizes=True)
