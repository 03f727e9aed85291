"""The loop of a rank above 0: it applies what rank 0 writes to the log, and decides nothing."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from mlx_parallm.distributed.codec import StepDecoder
from mlx_parallm.distributed.link import FollowerLink
from mlx_parallm.distributed.log import LONG_S, Entry, Refused
from mlx_parallm.distributed.watch import Watch
from mlx_parallm.types.errors import ParallmError, RankLostError
from mlx_parallm.worker.device.properties import free_memory_bytes, give_back_memory
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.ops import (
    AddAdapter,
    Allocate,
    ComputeInputs,
    DropAdapter,
    DropInputs,
    DropTensors,
    Load,
    Pending,
    PrepareWeights,
    PutTensors,
    ReadBlocks,
    ReadStates,
    StageAdapter,
    Step,
    WriteBlocks,
    WriteStates,
)
from mlx_parallm.worker.worker import Worker

logger = logging.getLogger(__name__)

# UNSETTLED: ops that rank 0 applies while a step is in flight.
UNSETTLED = (
    *(AddAdapter, ComputeInputs, DropAdapter, DropInputs, DropTensors),
    *(PrepareWeights, PutTensors, ReadBlocks, ReadStates, StageAdapter, WriteBlocks, WriteStates),
)
# VERDICTS: ops whose result rank 0 waits for, and which any rank may refuse.
VERDICTS = (Load, Allocate, AddAdapter, PrepareWeights)


class Follower:
    """Applies the entries of the log, in order, on the thread that made it."""

    def __init__(
        self,
        ranks: Ranks,
        link: FollowerLink,
        watch: Watch,
        worker: Worker,
        localise: Callable[[Load], Load],
    ) -> None:
        """Prepare.

        Args:
            ranks: all ranks.
            link: brings the log.
            watch: hears of the progress.
            worker: has this rank's part of the models.
            localise: returns a load with the path that the model has on this machine.
        """
        self._ranks = ranks
        self._link = link
        self._watch = watch
        self._worker = worker
        self._localise = localise
        self._decoders: defaultdict[str, StepDecoder] = defaultdict(StepDecoder)
        self._latest: Pending[Any] | None = None

    def run(self) -> None:
        """Apply entries until rank 0 says goodbye.

        Raises:
            RankLostError: rank 0 is gone.
        """
        while (message := self._link.receive()) is not None:
            self._apply(Entry(message.kind), message.payload, message.number)

    def _apply(self, entry: Entry, payload: Any, number: int) -> None:
        if entry is Entry.STEP:
            self._step(*payload)
            return
        self._watch.begin(LONG_S)
        match entry:
            case Entry.OP:
                self._op(payload, number)
            case Entry.FREE_MEMORY:
                give_back_memory()
                self._link.reply(number, free_memory_bytes())
        self._watch.end()

    def _step(self, model: str, batch: bytes) -> None:
        """Begin a step, and only then end the one before: this rank runs ahead as rank 0 does.

        A step counts as begun once it is submitted, so that the skew shows the time that this takes
        a slow rank. It counts as ended without waiting for it: rank 0 waits for it, and by its sums
        for this rank's device.
        """
        step = Step(model=model, batch=self._decoders[model].decode(batch))
        latest, self._latest = self._latest, self._worker.begin(step)
        self._watch.begin()
        if latest is not None:
            latest.wait()
        self._watch.end()

    def _settle(self) -> None:
        """End the latest step."""
        if self._latest is not None:
            self._latest.wait()
            self._latest = None

    def _run(self, op: Any) -> Any:
        return self._worker.begin(op).wait()

    def _op(self, op: Any, number: int) -> None:
        if not isinstance(op, UNSETTLED):
            self._settle()
        if not isinstance(op, VERDICTS):
            self._run(op)
            return
        if isinstance(op, Load):
            # Rank 0 encodes the steps of a model that is loaded anew with a new encoder.
            self._decoders.pop(op.model, None)
            op = self._localise(op)
        verdict: Any
        try:
            verdict = self._run(op)
        except RankLostError:
            raise
        except Exception as problem:
            # Only a failure that nobody foresaw needs its place in the code.
            trace = None if isinstance(problem, ParallmError) else problem
            what = type(op).__name__
            logger.error(  # noqa: TRY400 - see above
                "rank %d refuses %s: %s", self._ranks.rank, what, problem, exc_info=trace
            )
            verdict = Refused.of(problem)
        self._link.reply(number, verdict)
