"""The body of the engine thread: commands between steps, and steps by the turns of ``turns.py``."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mlx_parallm.engine.commands import Abort, Call, Command, LoopState, Stop, Submit, Wake
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.models import ServedEngine, WorkBeside
from mlx_parallm.engine.turns import Turns
from mlx_parallm.types.errors import ControlError, ModelNotFoundError, ParallmError
from mlx_parallm.types.work import Event, EventReader

if TYPE_CHECKING:
    from mlx_parallm.worker.worker import Worker


class StepClock:
    """Set by the engine thread; any thread may read it. A device that hangs is seen by it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None

    def begin(self) -> None:
        """Note that a step or a command begins; the one before it has ended."""
        self._began_s = self._clock()

    def end(self) -> None:
        """Note that the thread waits for a command."""
        self._began_s = None

    def running_s(self) -> float:
        """Return for how long the step in flight has run, in seconds; 0.0 if there is none."""
        began_s = self._began_s
        return 0.0 if began_s is None else self._clock() - began_s


logger = logging.getLogger(__name__)


class EngineLoop(LoopState):
    """Owns every engine of the process; runs until ``Stop``."""

    def __init__(
        self,
        engines: MutableMapping[str, ServedEngine],
        inbox: queue.SimpleQueue[Command | Wake],
        deliver: Callable[[Sequence[Event]], None],
        *,
        families: MetricFamilies,
        worker: Worker,
        beside: Sequence[WorkBeside] = (),
        max_stall_s: float | None = None,
        clock: StepClock | None = None,
    ) -> None:
        """Prepare.

        Args:
            engines: see ``LoopState``, as for the arguments that are not named here.
            inbox: where commands come from.
            deliver: sends events to the event loop.
            families: of metrics.
            worker: of this process.
            beside: work beside the models.
            max_stall_s: how long a decode step and a batch may take together, in seconds, if that
                is bounded.
            clock: is kept at how long the step in flight has run; None makes one.
        """
        self.engines = engines
        self.policies = {}
        self.missed = {}
        self.families = families
        self.worker = worker
        self.pending = {}
        self.stagings = {}
        self.beside = beside
        self.is_paused = False
        self.asleep = ()
        self.sleep_level = 0
        self._deliver = deliver
        self._readers: dict[str, EventReader] = {}
        self._inbox = inbox
        self._clock = clock or StepClock()
        self._turns = Turns(self.deliver, max_stall_s)
        for name, engine in engines.items():
            self.add(name, engine)

    @override
    def add(self, name: str, engine: ServedEngine) -> None:
        engine.wake_by(lambda: self._inbox.put(Wake()))
        self.engines[name] = engine
        self.policies[name] = engine.policies

    def run(self) -> None:
        """Serve until ``Stop``.

        Raises:
            DeviceLostError: the device computes nothing any more, so that every request would fail.
        """
        wait_s: float | None = 0.0
        try:
            while self._take_commands(wait_s):
                wait_s = self._turns.take(self.takers())
                if wait_s is None and self._prepare():
                    wait_s = 0.0
                self.worker.faults.check()
        finally:
            self._clock.end()

    @override
    def takers(self) -> Sequence[ServedEngine | WorkBeside]:
        return [*self.engines.values(), *self.beside]

    @override
    def deliver(self, events: Sequence[Event]) -> None:
        if self._readers:
            events = [event for event in events if not self._read_here(event)]
        if events:
            self._deliver(list(events))

    def _read_here(self, event: Event) -> bool:
        reader = self._readers.get(event.request_id)
        if reader is None:
            return False
        try:
            reader.put(event)
            is_complete = reader.is_complete
        except Exception:
            # A reader that fails must not end the engine.
            logger.exception("the reader of %s failed", event.request_id)
            is_complete = True
        if is_complete:
            del self._readers[event.request_id]
        return True

    def _prepare(self) -> bool:
        """Run a step of a model's warm-up; False if none has any.

        It is one step only: a request that arrives meanwhile waits for it.
        """
        return any(engine.prepare() for engine in self.engines.values())

    def _take_commands(self, wait_s: float | None) -> bool:
        """Apply what has arrived, waiting up to ``wait_s`` for the first; False after ``Stop``."""
        timeout: float | None = wait_s
        while True:
            self._clock.end()
            try:
                command = self._inbox.get(block=timeout != 0.0, timeout=timeout or None)
            except queue.Empty:
                return True
            finally:
                self._clock.begin()
            if isinstance(command, Stop):
                return False
            self._apply(command)
            timeout = 0.0

    def _apply(self, command: Submit | Abort | Call | Wake) -> None:
        match command:
            case Wake():
                # The next round asks every engine.
                pass
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command)
            case Call():
                command.reply(self._guard(lambda: command.action(self)))

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Return what an action gives, or its error."""
        try:
            return action()
        except ParallmError as refusal:
            return refusal
        except Exception as cause:
            # A command that fails must not end the engine.
            logger.exception("a command failed")
            error = ControlError(f"{type(cause).__name__}: {cause}")
            error.__cause__ = cause
            return error

    def _submit(self, command: Submit) -> None:
        result = self._guard(lambda: self._admit(command))
        if isinstance(result, ParallmError):
            command.reply(result)
            return
        if command.reader is not None:
            self._readers[command.request.request_id] = command.reader
        command.reply(None)
        self.deliver(result)

    def _admit(self, command: Submit) -> Sequence[Event]:
        engine = self.engines.get(command.request.model)
        if engine is None:
            raise ModelNotFoundError(command.request.model)
        for work in self.beside:
            if work.takes(command.request):
                return work.submit(command.request, arrival_s=command.arrival_s)
        if command.upload is not None:
            engine.policies.ensure(command.upload)
        return engine.submit(command.request, arrival_s=command.arrival_s)

    def _abort(self, command: Abort) -> None:
        for engine in self.takers():
            if command.is_notified:
                self.deliver(engine.cancel(command.request_id))
            elif engine.abort(command.request_id):
                break
        self._readers.pop(command.request_id, None)
