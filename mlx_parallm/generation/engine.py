"""One model's engine: schedule, run, update, and turn tokens into events."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from mlx_parallm.engine.live_weights import LiveWeights
from mlx_parallm.engine.models import QueueLoad, ServedEngine
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.turns import STALL_WAIT_S, TurnClass
from mlx_parallm.generation.admission import check_request
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.model import Grammars, Tokenizer
from mlx_parallm.generation.output_processor import OutputProcessor
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.generation.scheduler.step_cost import MIN_CHUNK
from mlx_parallm.generation.scheduler.updates import SchedulerStats, SequenceUpdate
from mlx_parallm.types.errors import (
    EarlierStepError,
    InvalidRequestError,
    OverloadedError,
    StepError,
)
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import (
    NoTracer,
    Phase,
    Runner,
    ScheduledBatch,
    StepInFlight,
    StepOutput,
    StepTracer,
)

if TYPE_CHECKING:
    from mlx_parallm.engine.kind import BuiltModel
    from mlx_parallm.generation.kv_cache.peer.exports import Exports
    from mlx_parallm.worker.generation.warm_up import WarmUp

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Returns a model with so many bytes of KV memory and the policies that it had.
Reassemble = Callable[[int, Policies], "BuiltModel"]

# SAVE_S: seconds that saving takes at most when the device's memory is to be released.
SAVE_S = 5.0
# SAVE_POLL_S: how often it is asked meanwhile whether stores take more.
SAVE_POLL_S = 0.01
# NUM_STEPS: latest decode steps whose median predicts the next one.
NUM_STEPS = 9
# WAITED_SHARE: the host has waited for the end of a step if that took this share of its time.
# Otherwise it only read results that were there.
WAITED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that was submitted.

    Attributes:
        batch: what it runs.
        step: its results.
        begin_s: when it began to be scheduled.
        seconds: from the end of the step before, or from ``begin_s``, to the submission.
    """

    batch: ScheduledBatch
    step: StepInFlight
    begin_s: float
    seconds: float


class StepPace:
    """The seconds of the latest steps that did nothing but decode."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=NUM_STEPS)

    def observe(self, seconds: float) -> None:
        """Note a step that has ended."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Return their median; 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0


class GenerationEngine(ServedEngine):
    """Steps one model; every method runs on the engine thread.

    Attributes:
        info: facts about the loaded model.
        tokenizer: the model's tokenizer.
        policies: the names under which the model computes.
        live: the model's own weights; None if they never change.
        grammars: compiles the grammars that samples must match; None if no request has one.
        reassemble: makes another engine of the model, with KV memory of another size; None if it
            cannot change.
    """

    turn_class = TurnClass.STREAMS

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        *,
        live: LiveWeights | None = None,
        tiers: Tiers | None = None,
        grammars: Grammars | None = None,
        warm_up: WarmUp | None = None,
        seed: int = 0,
        tracer: StepTracer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.info = runner.info
        self.tokenizer = tokenizer
        # A config may name end tokens that the model has no logits for.
        self._end_ids = frozenset(
            token_id for token_id in tokenizer.eos_ids if 0 <= token_id < self.info.vocab_size
        )
        self.live = live
        self._tiers = tiers
        self.grammars = grammars
        if live is None:
            self.policies = Policies(model="", users=scheduler)
        else:
            self.policies = live.policies
        self._scheduler = scheduler
        self._runner = runner
        self._metrics = metrics
        self._processor = OutputProcessor()
        self._seeds = random.Random(seed)
        self._tracer = tracer or NoTracer()
        self._clock = clock
        self._in_flight: _Begun | None = None
        self._warm_up = warm_up
        self.reassemble: Reassemble | None = None
        self._pace = StepPace()
        # When the end of the latest step was seen, and the end of the time that counts as that of
        # earlier steps.
        self._ended_s = self._counted_s = 0.0

    @property
    def step_s(self) -> float:
        """Return the seconds of a step that does nothing but decode; 0 before the first."""
        return self._pace.seconds

    @property
    def exports(self) -> Exports | None:
        """Return what answers other servers' requests for KV; None if they may have none."""
        return None if self._tiers is None else self._tiers.exports

    @property
    @override
    def waiting_since_s(self) -> float:
        """Streams wait always."""
        return -math.inf

    @property
    @override
    def load(self) -> QueueLoad:
        stats, info = self._metrics.stats, self.info
        return QueueLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_used_tokens=round(stats.kv_usage * info.num_blocks) * info.block_size,
            num_kv_tokens=info.num_blocks * info.block_size,
            num_requests=self.num_requests,
        )

    @property
    def stats(self) -> SchedulerStats:
        """Its load and its counters."""
        return self._scheduler.stats()

    @override
    def submit(
        self, request: GenerateRequest, *, arrival_s: float | None = None
    ) -> Sequence[GenerateEvent]:
        check_request(request, self.info)
        params = request.params
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(31)
        # A complete grammar allows only an end token, so samples with a grammar always end.
        is_endless = params.ignore_eos and params.grammar is None
        end_ids = frozenset[int]() if is_endless else self._end_ids
        weights = self.policies.weights_of(request.adapter)
        if params.values:
            self._check_values(request)
        with self._counted_rejection():
            self._scheduler.add(request, seed=seed, end_ids=end_ids, weights=weights)
        self._processor.add(request, self.tokenizer)
        self._metrics.on_add(request, arrival_s)
        return ()

    def _check_values(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError unless the weights of a request have a value head."""
        adapter = request.adapter
        if self.info.has_value_head or (adapter and self.policies.head_of(adapter) is not None):
            return
        raise InvalidRequestError(
            f"{adapter or request.model} has no value head (v_head or score of one label), so "
            "there are no values.",
            param="values",
        )

    def check_room(self, client: str, count: int) -> None:
        """Raise OverloadedError, and count it, if the queue has no room; any thread may ask."""
        with self._counted_rejection():
            self._scheduler.check_room(client, count)

    @contextmanager
    def _counted_rejection(self) -> Generator[None]:
        try:
            yield
        except OverloadedError:
            self._metrics.on_reject()
            raise

    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks; False if it is not here."""
        if not self._scheduler.abort(request_id):
            return False
        self._processor.remove(request_id)
        self.policies.forget_unused()
        self._metrics.on_abort(request_id)
        self._metrics.on_queue(self._scheduler.stats())
        return True

    def cancel(self, request_id: str) -> list[GenerateEvent]:
        """``abort``, and the last event of every sample; none if it is not here."""
        events = self._processor.end(request_id)
        return events if self.abort(request_id) else []

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._processor)

    def has_work(self) -> bool:
        """Return True if a step would run or end anything."""
        if self.is_paused:
            return False
        if self._tiers is not None and self._tiers.has_asked:
            return True
        return self._scheduler.has_work() or self._in_flight is not None

    def prepare(self) -> bool:
        """Run the next step of the warm-up; False if there is none, or none may run now.

        The engine must have no work. An error ends the warm-up.
        """
        if self._warm_up is None or self.is_paused or (self.live is not None and self.live.asleep):
            return False
        if self._warm_up.is_done:
            self._warm_up = None
            return False
        with self._scheduler.borrowed_block() as block:
            if block is None:
                return False
            try:
                self._warm_up.run_next(block)
            except Exception:
                logger.exception("the warm-up ended, because one of its steps failed")
                self._warm_up = None
        return True

    def settle(self) -> list[GenerateEvent]:
        """End the step in flight, if there is one; its events."""
        ending, self._in_flight = self._in_flight, None
        updates: list[SequenceUpdate] = []
        if ending is not None:
            self._end(ending, updates)
        return self._publish(updates)

    @override
    def reset_cache(self, *, reset_running: bool = False, reset_external: bool = True) -> None:
        self._scheduler.reset_prefix_cache(reset_running=reset_running)
        if self._tiers is not None and reset_external:
            self._tiers.clear()

    @override
    def release(self) -> None:
        # Hashing goes on: a later load of the model takes over what this one chose once its content
        # is known.
        if self._tiers is not None:
            self._tiers.close()
        self._runner.release()

    @override
    def resized(self, num_bytes: int) -> BuiltModel | None:
        if self.reassemble is None:
            return None
        # The stores go with this engine; they keep what they have on disk.
        self.close()
        return self.reassemble(num_bytes, self.policies)

    @override
    def wake_by(self, wake: Callable[[], None]) -> None:
        if self._tiers is not None:
            self._tiers.wake_by(wake)

    @override
    def stalled_s(self) -> float:
        """Blocks that are read wake the loop; a read that is late does not."""
        due_in_s = None if self._tiers is None else self._tiers.fetches.due_in_s
        return STALL_WAIT_S if due_in_s is None else max(STALL_WAIT_S, due_in_s)

    @override
    def save_part(self) -> bool:
        if self._tiers is None or not self._tiers.saves:
            return False
        return self._save_batch() is not False

    @override
    def save(self) -> None:
        if self._tiers is None:
            return
        self._scheduler.recompute_running()
        self._save_all()

    @override
    def close(self) -> None:
        if self._tiers is not None:
            self._save_all()
            self._tiers.close()

    def _save_all(self) -> None:
        """Save what waits to be saved, as far as that takes a short time.

        Stores that are full of what is still to be written are waited for.
        """
        assert self._tiers is not None, "there is where to save it"
        until_s = time.monotonic() + SAVE_S
        while self._tiers.saves and time.monotonic() < until_s:
            has_saved = self._save_batch()
            if has_saved is None:
                time.sleep(SAVE_POLL_S)
            elif not has_saved:
                return

    def _save_batch(self) -> bool | None:
        """Save one batch of blocks; None if stores take none now, False if it failed."""
        batch = self._scheduler.schedule_saves()
        if batch is None:
            return None
        output = self._attempt(batch, partial(self._run, batch), [])
        if output is not None:
            self._scheduler.update(batch, output)
        return output is not None

    def _run(self, batch: ScheduledBatch) -> StepOutput:
        return self._runner.submit(batch).wait()

    def step(self, within_s: float | None = None) -> list[GenerateEvent] | None:
        """Begin a batch, end one, and return the events of the latter; None if nothing could run.

        ``within_s`` is None if no streams of other models wait for it. How long it is does not
        matter: the scheduler bounds the time of its steps.

        Where the runner runs ahead, the batch that ends is the one before: the device works on the
        new one while this thread turns tokens into events.
        """
        with self._tracer.span(Phase.STEP):
            begin_s = self._clock()
            if self._in_flight is None:
                self._counted_s = begin_s
            with self._tracer.span(Phase.SCHEDULE):
                if self._tiers is not None:
                    self._tiers.answer_peers()
                batch = self._scheduler.schedule(is_shared=within_s is not None)
            if batch is None and self._in_flight is None:
                return None
            updates: list[SequenceUpdate] = []
            begun = None if batch is None else self._begin(batch, begin_s, updates)
            ending = begun
            if self.info.runs_ahead:
                ending, self._in_flight = self._in_flight, begun
            if ending is not None:
                self._end(ending, updates)
            return self._publish(updates)

    def _begin(
        self, batch: ScheduledBatch, begin_s: float, updates: list[SequenceUpdate]
    ) -> _Begun | None:
        self._metrics.on_schedule(self._scheduler.take_started(), batch)
        begun = self._attempt(batch, partial(self._submit, batch, updates), updates)
        before_s, self._counted_s = self._counted_s, self._clock()
        return None if begun is None else _Begun(*begun, begin_s, self._counted_s - before_s)

    def _submit(
        self, batch: ScheduledBatch, updates: list[SequenceUpdate]
    ) -> tuple[ScheduledBatch, StepInFlight]:
        """Submit a batch; return what was submitted.

        If the step in flight could not be submitted, it fails first, and the batch follows without
        its sequences. All of the batch fails with it if something is moved before the batch, or if
        sequences have states, which the step in flight may have changed.
        """
        try:
            return batch, self._runner.submit(batch)
        except EarlierStepError:
            if self._in_flight is None or batch.moves or self.info.has_state:
                raise
            refused, self._in_flight = self._in_flight, None
            self._end(refused, updates)
            batch = self._scheduler.without_ended(batch)
            if not batch.sequences:
                raise
            return batch, self._runner.submit(batch)

    def _end(self, begun: _Begun, updates: list[SequenceUpdate]) -> None:
        batch, wait_s = begun.batch, self._clock()
        with self._tracer.span(Phase.WAIT, batch):
            output = self._attempt(batch, begun.step.wait, updates)
        before_s, self._ended_s = self._ended_s, self._clock()
        self._counted_s = self._ended_s
        waited_s = self._ended_s - wait_s
        if self._runner.submits_beside:
            # A step that ran behind another began when that one ended.
            seconds = self._ended_s - max(begun.begin_s, before_s)
        else:
            # Exclude the time spent submitting the next step: if submit() blocks on the device, the
            # wait belongs to that step.
            seconds = begun.seconds + waited_s
        is_end_known = not self.info.runs_ahead or waited_s >= WAITED_SHARE * seconds
        if output is None:
            self._lose_in_flight(updates)
        else:
            with self._tracer.span(Phase.UPDATE, batch):
                self._scheduler.observe(batch, seconds, is_end_known=is_end_known)
                is_short = all(len(row.token_ids) < MIN_CHUNK for row in batch.sequences)
                if is_short and not batch.moves.take_time:
                    self._pace.observe(seconds)
                updates += self._scheduler.update(batch, output)

    def _lose_in_flight(self, updates: list[SequenceUpdate]) -> None:
        """Fail the step behind one whose wait failed, even if its own wait succeeds.

        On Metal both may have failed with one error, which the first wait cleared.
        """
        lost, self._in_flight = self._in_flight, None
        if lost is not None:

            def wait_in_vain() -> None:
                lost.step.wait()
                raise StepError("the step before it failed")

            self._attempt(lost.batch, wait_in_vain, updates)
        if self.info.has_state:
            # Their states may have been copied by the steps that failed.
            self._scheduler.recompute_running()

    def _attempt(
        self, batch: ScheduledBatch, action: Callable[[], T], updates: list[SequenceUpdate]
    ) -> T | None:
        """Return what an action returns; None if it raised and ended the requests of the batch."""
        try:
            return action()
        except Exception as cause:
            logger.exception("step %d failed", batch.step_id)
            updates += self._scheduler.fail(batch, f"{type(cause).__name__}: {cause}")
            return None

    def _publish(self, updates: list[SequenceUpdate]) -> list[GenerateEvent]:
        with self._tracer.span(Phase.DETOKENIZE):
            processed = self._processor.process(updates)
        with self._tracer.span(Phase.PUBLISH):
            for request_id, index in processed.stopped:
                self._scheduler.finish(request_id, index)
            self.policies.forget_unused()
            self._metrics.on_events(processed.events)
            self._metrics.on_queue(self._scheduler.stats())
        return processed.events
