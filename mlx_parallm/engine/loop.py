"""The body of the engine thread: commands between steps, one step of each model in turn.

Steps of models that generate and batches of encoders take turns, so that neither starves. Steps of
a warm-up run while no model has work.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.commands import Abort, Call, Command, Encode, Stop, Submit
from mlx_parallm.engine.encoders.build import EncoderBuild
from mlx_parallm.engine.encoders.engine import EncodeEngine
from mlx_parallm.engine.encoders.metrics import EncoderFamilies
from mlx_parallm.engine.engine import Engine
from mlx_parallm.generation.scheduler.planner import TARGET_SHARE
from mlx_parallm.types.errors import ControlError, ModelNotFoundError, OverloadedError, ParallmError
from mlx_parallm.types.events import GenerateEvent

logger = logging.getLogger(__name__)

# How long to wait for a command when no engine could run anything although it has work.
STALL_WAIT_S = 0.01
# A batch beside streams takes at most this share of a decode step, so that the time between their
# tokens does not double: predictions err.
BATCH_SHARE = 0.7


class EngineLoop:
    """Owns every engine of the process; runs until it is told to stop.

    Attributes:
        engines: by their models' first names.
        encoders: likewise; they come and go.
        encoder_adapters: likewise; they stay when an encoder makes way.
        encoder_families: metrics of encoders.
        builds: encoders on their way into memory, by their commands' number.
        stagings: adapters on their way into a slot, likewise.
        deliver: sends events to their readers.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        inbox: queue.SimpleQueue[Command],
        deliver: Callable[[list[GenerateEvent]], None],
        encoders: MutableMapping[str, EncodeEngine] | None = None,
        *,
        encoder_families: EncoderFamilies,
        max_stall_s: float | None = None,
    ) -> None:
        """``max_stall_s``: how long a decode step and a batch may take together, if it is bounded.

        The other arguments are the attributes, and where commands come from.
        """
        self.engines = engines
        self.encoders = {} if encoders is None else encoders
        self.encoder_adapters = {name: one.adapters for name, one in self.encoders.items()}
        self.encoder_families = encoder_families
        self.builds: dict[int, EncoderBuild] = {}
        self.stagings: dict[int, AdapterStaging] = {}
        self.deliver = deliver
        self._inbox = inbox
        self._max_stall_s = max_stall_s

    def run(self) -> None:
        """Serve until ``Stop``."""
        wait_s: float | None = 0.0
        while self._take_commands(wait_s):
            outcomes = [engine.step() for engine in self.engines.values() if engine.has_work()]
            events = [event for outcome in outcomes if outcome for event in outcome]
            if events:
                self.deliver(events)
            self._run_encoders()
            wait_s = self._wait_s(stalled=all(outcome is None for outcome in outcomes))
            if wait_s is None and self._prepare():
                wait_s = 0.0

    def _prepare(self) -> bool:
        """Run a step of an engine's warm-up; False if none has any.

        It is one step only: a request that arrives meanwhile waits for it.
        """
        return any(engine.prepare() for engine in self.engines.values())

    def _run_encoders(self) -> None:
        """A batch of each encoder; beside streams some layers of one batch, the oldest first."""
        busy = [one for one in self.encoders.values() if one.has_work()]
        ready = [one for one in busy if one.ready_in_s() == 0.0]
        running = [engine for engine in self.engines.values() if engine.has_work()]
        if not running:
            for encoder in ready:
                encoder.step()
        elif ready:
            for engine in running:
                # What is in flight would be measured as a part of the batch, and its tokens wait.
                events = engine.settle()
                if events:
                    self.deliver(events)
            oldest = min(ready, key=lambda one: one.waiting_since_s)
            oldest.step(self._allowed_s(running))

    def _allowed_s(self, running: Sequence[Engine]) -> float:
        """How long streams may wait for a batch."""
        turn_s = sum(engine.decode_s for engine in running)
        if self._max_stall_s is None:
            return BATCH_SHARE * turn_s
        return max(0.0, TARGET_SHARE * self._max_stall_s - turn_s)

    def _wait_s(self, *, stalled: bool) -> float | None:
        """How long to wait for a command; None where there is nothing else to do."""
        waits = [one.ready_in_s() for one in self.encoders.values() if one.has_work()]
        if any(engine.has_work() for engine in self.engines.values()):
            waits.append(STALL_WAIT_S if stalled else 0.0)
        return min(waits, default=None)

    def _take_commands(self, wait_s: float | None) -> bool:
        """Apply what has arrived, waiting up to ``wait_s`` for the first; False after ``Stop``."""
        timeout: float | None = wait_s
        while True:
            try:
                command = self._inbox.get(block=timeout != 0.0, timeout=timeout or None)
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                return False
            self._apply(command)
            timeout = 0.0

    def _apply(self, command: Submit | Encode | Abort | Call) -> None:
        match command:
            case Encode():
                self._encode(command)
            case Submit():
                command.reply(self._admit(command))
            case Abort():
                self._abort(command)
            case Call():
                command.reply(self._guard(lambda: command.action(self)))

    def _encode(self, command: Encode) -> None:
        encoder = self.encoders.get(command.request.model)
        if encoder is None:
            command.reply(ModelNotFoundError(command.request.model))
        else:
            encoder.add(command.request, command.reply)

    def _guard(self, action: Callable[[], Any]) -> Any:
        """What an action gives, or its error."""
        try:
            return action()
        except ParallmError as refusal:
            return refusal
        except Exception as cause:
            # Whatever it was to change must not take the engine with it.
            logger.exception("a command failed")
            error = ControlError(f"{type(cause).__name__}: {cause}")
            error.__cause__ = cause
            return error

    def _abort(self, command: Abort) -> None:
        if any(encoder.abort(command.request_id) for encoder in self.encoders.values()):
            return
        for engine in self.engines.values():
            if command.is_told:
                events = engine.cancel(command.request_id)
                if events:
                    self.deliver(events)
            elif engine.abort(command.request_id):
                return

    def _admit(self, command: Submit) -> ParallmError | None:
        engine, upload = self.engines[command.request.model], command.upload
        if upload is not None:
            loaded = self._guard(lambda: engine.policies.ensure(upload))
            if isinstance(loaded, ParallmError):
                return loaded
        try:
            engine.add(command.request, arrival_s=command.arrival_s)
        except ParallmError as refusal:
            if isinstance(refusal, OverloadedError):
                engine.on_reject()
            return refusal
        return None
