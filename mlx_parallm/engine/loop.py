"""The body of the engine thread: commands between steps, one step of each model in turn.

Steps of models that generate and batches of encoders take turns, so that neither starves.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from mlx_parallm.engine.commands import Abort, Call, Command, Encode, Stop, Submit
from mlx_parallm.engine.encode_engine import EncodeEngine
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ControlError, ModelNotFoundError, OverloadedError, ParallmError
from mlx_parallm.outputs import GenerateEvent

logger = logging.getLogger(__name__)

# How long to wait for a command when no engine could run anything although it has work.
STALL_WAIT_S = 0.01


class EngineLoop:
    """Owns every engine of the process; runs until it is told to stop.

    Attributes:
        engines: by their models' first names.
        encoders: likewise; they come and go.
        deliver: sends events to their readers.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        inbox: queue.SimpleQueue[Command],
        deliver: Callable[[list[GenerateEvent]], None],
        encoders: MutableMapping[str, EncodeEngine] | None = None,
    ) -> None:
        self.engines = engines
        self.encoders = {} if encoders is None else encoders
        self.deliver = deliver
        self._inbox = inbox

    def run(self) -> None:
        """Serve until ``Stop``."""
        wait_s: float | None = 0.0
        while self._take_commands(wait_s):
            outcomes = [engine.step() for engine in self.engines.values() if engine.has_work()]
            events = [event for outcome in outcomes if outcome for event in outcome]
            if events:
                self.deliver(events)
            generates = any(engine.has_work() for engine in self.engines.values())
            for encoder in self.encoders.values():
                if encoder.has_work():
                    encoder.step(beside=generates)
            if any(encoder.has_work() for encoder in self.encoders.values()):
                wait_s = 0.0
            elif not generates:
                wait_s = None
            else:
                stalled = all(outcome is None for outcome in outcomes)
                wait_s = STALL_WAIT_S if stalled else 0.0

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
