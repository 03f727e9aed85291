"""Rank 0's worker: each op about a shared model goes to the other ranks before it begins here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, TypeVar

from typing_extensions import override

from mlx_parallm.distributed.codec import StepEncoder
from mlx_parallm.distributed.log import (
    LONG_S,
    Entry,
    LeaderLog,
    Refused,
)
from mlx_parallm.types.errors import ConfigError, ConflictError, RankLostError
from mlx_parallm.types.step import StepTracer
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.shared_tensors import share_large
from mlx_parallm.worker.ops import (
    AddAdapter,
    Allocate,
    Checksums,
    Done,
    DropAdapter,
    DropPrepared,
    Load,
    Op,
    Pending,
    PrepareWeights,
    PutTensors,
    ReadAdapter,
    Step,
    Unload,
    Wake,
)
from mlx_parallm.worker.training_ops import (
    CloseTraining,
    ForgetTraining,
    MeasureInputs,
    OpenTraining,
)
from mlx_parallm.worker.worker import Worker

R = TypeVar("R")

# LONG: ops that read weights, or compile kernels.
LONG = (Load, Allocate, PrepareWeights, Wake, Checksums)
# OF_SESSIONS: ops of training sessions, which are not shared: see ``LeadingWorker.begin``.
OF_SESSIONS = (OpenTraining, MeasureInputs)
# WITHOUT_SESSIONS: ops that have nothing to do where there are no sessions.
WITHOUT_SESSIONS = (CloseTraining, ForgetTraining)


class LeadingWorker(Worker):
    """Runs the models of rank 0, and keeps those of the other ranks at the same op.

    Models of other kinds than the shared ones are loaded here only.

    An op about a shared model that fails in any way but by a verdict ends all ranks: some of them
    may have applied it, and the next sum would never end.
    """

    def __init__(
        self,
        ranks: Ranks,
        log: LeaderLog,
        shared: Collection[type],
        tracer: StepTracer | None = None,
    ) -> None:
        """Prepare.

        Args:
            ranks: all ranks.
            log: carries the ops.
            shared: the classes of the specs whose models all ranks compute.
            tracer: records every step; None records nothing.
        """
        super().__init__(tracer, ranks=ranks)
        self._shared_ranks = ranks
        self._log = log
        self._specs = tuple(shared)
        self._encoders: dict[str, StepEncoder] = {}

    @override
    def least_free(self, own: int | None) -> int | None:
        number = self._log.begin(Entry.FREE_MEMORY, None)
        known = [own, *self._log.replies(number)]
        self._log.end()
        numbers = [each for each in known if each is not None]
        return min(numbers) if len(numbers) == len(known) else None

    def begin(self, op: Op[R]) -> Pending[R]:
        """See ``Worker.begin``.

        Raises:
            ConflictError: a training session was asked for, which no rank can run alone.
        """
        return self._begin_shared(op) if self._is_shared(op) else super().begin(op)

    def _begin_shared(self, op: Any) -> Pending[Any]:
        nothing: Any = None
        match op:
            case Step():
                return self._step(op)
            case PutTensors():
                self._put(op)
                return Done(nothing)
            case Load() | Allocate():
                return Done(self._agreed_plan(op))
            case AddAdapter() | PrepareWeights():
                return Done(self._verdict(op))
            case ReadAdapter():
                raise ConflictError("An adapter cannot be read back from several ranks.")
            case _ if isinstance(op, OF_SESSIONS):
                raise ConflictError("Training sessions cannot be used over several ranks.")
            case _ if isinstance(op, WITHOUT_SESSIONS):
                return Done(nothing)
            case _:
                return self._told(op)

    def _begin_here(self, op: Any) -> Pending[Any]:
        return super().begin(op)

    def _is_shared(self, op: Op[Any]) -> bool:
        model: str = getattr(op, "model")  # noqa: B009 - every op has one
        if isinstance(op, Load) and isinstance(op.spec, self._specs):
            self._encoders[model] = StepEncoder()
        return model in self._encoders

    def _step(self, op: Step) -> Pending[Any]:
        with self._log.fatal("a step"):
            # The encoder expects followers to get all that it has encoded, even in part.
            batch = self._encoders[op.model].encode(op.batch)
            self._log.begin(Entry.STEP, (op.model, batch))
            return _LeadingStep(self._log, super().begin(op))

    def _told(self, op: Op[Any]) -> Pending[Any]:
        """Apply an op that all ranks apply alike, so that none has anything to say about it."""
        self._log.begin(Entry.OP, op, _limit_s(op))
        if isinstance(op, Unload):
            del self._encoders[op.model]
        with self._log.fatal(type(op).__name__):
            result = super().begin(op).wait()
        self._log.end()
        return Done(result)

    def _put(self, op: PutTensors) -> None:
        """Send tensors; numbers of large ones follow when an op needs them, see ``on_devices``."""
        shared = share_large(op.tensors, self._shared_ranks.backend)
        op = replace(op, tensors=shared)
        self._log.begin(Entry.OP, op)
        super().begin(op)
        self._log.end()

    def _agreed_plan(self, op: Load | Allocate) -> Any:
        """Return the plan of a load, which must be the same on all ranks.

        Raises:
            ConfigError, ModelLoadError: the model cannot be loaded; or ranks chose differently.
        """
        number = self._log.begin(Entry.OP, op, _limit_s(op))
        plan = super().begin(op).wait()
        others = self._log.replies(number)
        self._log.end()
        for rank, other in enumerate(others, 1):
            if isinstance(other, Refused):
                raise ConfigError(f"Rank {rank}: {other.error}")
            if other != plan:
                differing = _differing(plan, other)
                raise ConfigError(f"Rank {rank} loads {op.model} otherwise: {differing}.")
        return plan

    def _verdict(self, op: AddAdapter | PrepareWeights) -> Any:
        """Return what an op returns that any rank may refuse: then it has no effect on any.

        Raises:
            ParallmError: a rank refused it.
        """
        number = self._log.begin(Entry.OP, op, _limit_s(op))
        with self._log.fatal(type(op).__name__):
            own = self._own_verdict(op)
        verdicts = [own, *self._log.replies(number)]
        self._log.end()
        refusals = [(rank, each) for rank, each in enumerate(verdicts) if _is_refusal(op, each)]
        if not refusals:
            return own
        self._told(_undo(op))
        rank, refusal = refusals[0]
        if isinstance(refusal, Refused):
            raise refusal.error
        return refusal if rank == 0 else f"{refusal} (rank {rank})"

    def _own_verdict(self, op: AddAdapter | PrepareWeights) -> Any:
        try:
            return self._begin_here(op).wait()
        except RankLostError:
            raise
        except Exception as problem:  # noqa: BLE001 - it is raised once all ranks are as before
            return Refused.of(problem)


class _LeadingStep:
    """A step that all ranks run. Implements ``Pending``."""

    def __init__(self, log: LeaderLog, pending: Pending[Any]) -> None:
        self._log = log
        self._pending = pending

    @property
    def num_stages(self) -> int:
        return self._pending.num_stages

    def advance(self) -> None:
        self._pending.advance()

    def wait(self) -> Any:
        with self._log.fatal("a step"):
            result = self._pending.wait()
        self._log.end()
        return result


def _limit_s(op: Op[Any]) -> float | None:
    """Return the seconds that an op may take; None for the usual."""
    return LONG_S if isinstance(op, LONG) else None


def _undo(op: AddAdapter | PrepareWeights) -> Op[None]:
    """Return the op that makes ranks forget what they accepted."""
    if isinstance(op, PrepareWeights):
        return DropPrepared(model=op.model)
    return DropAdapter(model=op.model, content=op.content)


def _is_refusal(op: AddAdapter | PrepareWeights, verdict: Any) -> bool:
    """True if a rank's verdict is a refusal; that of weights is why they do not fit, or None."""
    return isinstance(verdict, Refused) or (isinstance(op, PrepareWeights) and verdict is not None)


def _differing(plan: Any, other: Any) -> str:
    names = [
        each.name for each in fields(plan) if getattr(plan, each.name) != getattr(other, each.name)
    ]
    return ", ".join(
        f"{name} is {getattr(other, name)}, not {getattr(plan, name)}" for name in names
    )
