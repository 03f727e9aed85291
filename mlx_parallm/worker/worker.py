"""The worker: the one door to the device, which holds the models and runs ops on them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.step import NoTracer, StepTracer
from mlx_parallm.worker.device.allocator import limit_arrays
from mlx_parallm.worker.device.dispatcher import Dispatcher, dispatcher_of_device
from mlx_parallm.worker.device.faults import DeviceFaults, drain_device, is_device_error
from mlx_parallm.worker.device.properties import give_back_memory
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.shared_tensors import on_hosts
from mlx_parallm.worker.ops import (
    AddAdapter,
    ComputeInputs,
    Done,
    DropTensors,
    Load,
    Op,
    Pending,
    PutTensors,
    Step,
    Unload,
)

R = TypeVar("R")

Tensors = Mapping[str, HostTensor]


class WorkerModel(Protocol):
    """A model in memory, as the worker calls it."""

    def begin(self, op: Any, tensors: Mapping[str, Tensors], /) -> Pending[Any]:
        """Begin an op that names this model; ``tensors`` are by handle."""
        ...

    def recover(self) -> None:
        """Drop what was computed by work whose results are lost; nothing is in flight."""
        ...

    def release(self) -> None:
        """Free the memory of the model; no op names it any more."""
        ...


class TrainingSessions(Protocol):
    """The training sessions of a model."""

    def begin(self, op: Any, /) -> Pending[Any]:
        """Begin an op that names a session; raise if it is refused."""
        ...

    def recover(self) -> None:
        """Forget what was computed by work whose results are lost; the sessions stay."""
        ...

    def release(self) -> None:
        """Forget all sessions."""
        ...


class PendingLoad(Pending[Any], Protocol):
    """A model whose weights are being read; ``wait`` returns its plan."""

    @property
    def num_bytes(self) -> int:
        """Return the size of its weights."""
        ...

    @property
    def model(self) -> WorkerModel | None:
        """Return the model once ``wait`` has returned."""
        ...


class Loader(Protocol):
    """Loads the models of one class of specs."""

    def begin(self, op: Load, device: Device, /) -> PendingLoad:
        """Begin to load a model.

        Raises:
            ConfigError: a setting does not suit the model.
            ModelLoadError: it cannot be loaded.
        """
        ...


class Device(Protocol):
    """The part of the worker that loaders use."""

    @property
    def tracer(self) -> StepTracer:
        """Return the tracer that records every step."""
        ...

    @property
    def faults(self) -> DeviceFaults:
        """Return the failures of the device."""
        ...

    @property
    def dispatcher(self) -> Dispatcher:
        """Return what submits steps to the device."""
        ...

    def take(self, model: str, /) -> WorkerModel:
        """Return a loaded model, which is part of another one from now on."""
        ...


class Worker:
    """Holds the models of this process and runs ops on them, on the thread that made it.

    ``begin`` applies an op, which may still run on the device when it returns. Ops are applied in
    the order of ``begin``, in whatever order they are waited for.

    Attributes:
        faults: failures of the device, which any op may hear of. All models then recover.
        dispatcher: submits steps of generation models. Every other op waits for it first.
    """

    def __init__(
        self,
        tracer: StepTracer | None = None,
        *,
        ranks: Ranks | None = None,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        """Begin without models.

        Args:
            tracer: records every step; None records nothing.
            ranks: the processes that compute generation models together; None for one process.
            dispatcher: None for the default device's.
        """
        self.tracer: StepTracer = tracer or NoTracer()
        self.ranks = ranks
        self.faults = DeviceFaults(may_wait=ranks is None)
        # Ranks compute sums together, in one order.
        own = Dispatcher() if ranks is not None else dispatcher or dispatcher_of_device()
        self.dispatcher: Dispatcher = own
        self._loaders: dict[type, Loader] = {}
        self._models: dict[str, WorkerModel] = {}
        self._tensors: dict[str, dict[str, HostTensor]] = {}

    def install(self, spec: type, loader: Loader) -> None:
        """Use a loader for specs of this class."""
        self._loaders[spec] = loader

    def execute(self, op: Op[R]) -> R:
        """Run an op and return its result."""
        return self.begin(op).wait()

    def begin(self, op: Op[R]) -> Pending[R]:
        """Begin an op; raise if it is refused. A failing op raises here or in ``wait``."""
        turn = self._turn(op)
        with turn():
            pending = self._begin(op)
        if isinstance(pending, Done | _Loading):
            return pending
        return _Begun(pending, turn)

    def _turn(self, op: object) -> Callable[[], AbstractContextManager[None]]:
        """Return what surrounds the parts of an op; a step waits for the dispatcher by itself."""
        return self._recovering if isinstance(op, Step) else self._joined

    @contextmanager
    def _joined(self) -> Generator[None]:
        """Do as ``_recovering``, while nothing is being submitted to the device."""
        with self._recovering():
            self.dispatcher.join()
            yield

    @contextmanager
    def _recovering(self) -> Generator[None]:
        """Leave device and models ready for the next op if this one fails."""
        faults, count, num_noted = self.faults, self.faults.count, self.faults.num_noted
        try:
            yield
        except Exception as error:
            self.dispatcher.join()
            # A model that recovers by itself has noted the error.
            if is_device_error(error) and faults.num_noted == num_noted:
                faults.note(error)
            if faults.count > count:
                for model in self._models.values():
                    model.recover()
            raise

    def _begin(self, op: Op[R]) -> Pending[R]:
        match op:
            case Load():
                return self._load(op)
            case Unload(model=name):
                self._unload(name)
            case PutTensors(handle=handle, tensors=tensors):
                self._tensors.setdefault(handle, {}).update(tensors)
            case DropTensors(handle=handle):
                self._tensors.pop(handle, None)
            case _:
                self._complete(op)
                model: Any = getattr(op, "model")  # noqa: B009 - every other op has one
                return self._models[model].begin(op, self._tensors)
        nothing: Any = None
        return Done(nothing)

    def _complete(self, op: Op[Any]) -> None:
        """Get the numbers of shared tensors for an op that needs them in host memory."""
        handles: tuple[str, ...] = ()
        match op:
            case AddAdapter(handle=handle):
                handles = (handle,)
            case ComputeInputs():
                handles = op.handles
        if self.ranks is not None:
            for handle in handles:
                self._tensors[handle] = on_hosts(self._tensors[handle], self.ranks)

    def give_back(self) -> None:
        """Return the memory of freed arrays to the system: it would count as taken."""
        with self._joined():
            give_back_memory()

    def least_free(self, own: int | None) -> int | None:
        """Return the free bytes of the device that has least; ``own`` are those of this process."""
        return own

    def close(self) -> None:
        """Wait until the device is idle; no op follows, and the models may be freed.

        What a graph reads and writes must be there while it is submitted and computed. A failed
        device has nothing more to do, and one of several ranks may wait for ranks that are gone.
        """
        self.dispatcher.close()
        if self.faults.may_wait:
            drain_device()

    def take(self, model: str) -> WorkerModel:
        """Return a loaded model, which no later op names."""
        return self._models.pop(model)

    def _load(self, op: Load) -> Pending[Any]:
        pending = self._loaders[type(op.spec)].begin(op, self)
        return _Loading(pending, self._joined, op.model, self._models)

    def _unload(self, name: str) -> None:
        model = self._models.pop(name, None)
        if model is not None:
            model.release()


class _Begun(Generic[R]):
    """An op that was begun; the worker recovers if it fails."""

    def __init__(
        self, pending: Pending[R], recovering: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._pending = pending
        self._recovering = recovering

    @property
    def num_stages(self) -> int:
        return self._pending.num_stages

    def advance(self) -> None:
        with self._recovering():
            self._pending.advance()

    def wait(self) -> R:
        with self._recovering():
            return self._pending.wait()


class _Loading(_Begun[Any]):
    """A load whose model joins the worker's when it is complete."""

    def __init__(
        self,
        pending: PendingLoad,
        recovering: Callable[[], AbstractContextManager[None]],
        name: str,
        models: dict[str, WorkerModel],
    ) -> None:
        super().__init__(pending, recovering)
        self._load = pending
        self._name = name
        self._models = models

    @property
    def num_bytes(self) -> int:
        return self._load.num_bytes

    def wait(self) -> Any:
        plan = super().wait()
        assert self._load.model is not None
        self._models[self._name] = self._load.model
        limit_arrays()
        return plan
