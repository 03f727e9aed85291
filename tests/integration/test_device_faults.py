"""A step in flight while another op hears that the device has failed, and answers after that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS, PREFIX
from mlx_parallm.engine.build import build_models
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.training.engine import TrainingEngine
from mlx_parallm.training.metrics import TrainingMetrics
from mlx_parallm.training.requests import TrainingEvent, TrainingRequest
from mlx_parallm.types.errors import StepError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.pooling import PoolingEvent, PoolingInput, PoolRequest
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch, ScheduledSequence
from mlx_parallm.types.training import Distribution, TrainableSpec
from mlx_parallm.worker.device.faults import LATE, DeviceFaults
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.ops import (
    Op,
    Pending,
    PoolBatch,
    Step,
    at_once,
)
from mlx_parallm.worker.training_ops import (
    OpenTraining,
)
from mlx_parallm.worker.worker import Worker
from tests import adapter_files
from tests.compiled_attention import AheadAttention
from tests.integration.test_parity_generate import loaded_model
from tests.recorded_worker import kinds_of

GENERATOR, OTHER, EMBEDDER = "generator", "other", "embedder"
NUM_TOKENS = 12
#: CHUNK: tokens of the longest chunk of a prompt; prompts have more.
CHUNK = 32


class FaultyWorker(Worker):
    """The next op of a model and class that ``failing`` has raises the device's late error."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: tuple[str, type] | None = None

    def _begin(self, op: Op[Any]) -> Pending[Any]:
        if self.failing == (getattr(op, "model", ""), type(op)):
            self.failing = None
            raise RuntimeError(f"{LATE}: Insufficient Memory.")
        return super()._begin(op)


class Served:
    """Two models that generate, one that embeds, and training sessions, in one worker."""

    def __init__(self) -> None:
        self.worker = FaultyWorker()
        #: Errors of requests by their ids.
        self.failed: dict[str, Exception] = {}
        self.num_inputs = 0
        folders = {
            GENERATOR: DEMO_FOLDER,
            OTHER: DEMO_FOLDER,
            EMBEDDER: DEMO_FOLDERS[PREFIX + "embed"],
        }
        config = EngineConfig(
            models=tuple(
                ModelConfig(path=str(path), served_names=(name,)) for name, path in folders.items()
            ),
            cache=CacheConfig(kv_cache_bytes=4 << 20, block_size=16),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=CHUNK),
            warm_up=False,
        )
        built = build_models(
            kinds_of(ahead=True), config, MetricFamilies(), self.worker, lambda *_: None
        )
        self.engines: dict[str, Any] = {model.model.names[0]: model.engine for model in built}
        tensors = read_safetensors(adapter_files.upload(1), param="adapter")
        weights = read_adapter(adapter_files.CONFIG, tensors, param="adapter")
        self.engines[GENERATOR].policies.load(AdapterUpload(name="adapter", weights=weights))
        self.training = TrainingEngine(self.worker, TrainingMetrics(MetricFamilies()))

    def ask(
        self,
        name: str,
        model: str = GENERATOR,
        adapter: str | None = None,
        first_id: int = 60,
    ) -> None:
        self.engines[model].submit(
            GenerateRequest(
                request_id=name,
                model=model,
                prompt_ids=tuple(range(first_id, first_id + 40)),
                params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS),
                adapter=adapter,
            )
        )

    def tokens(self, **where: Any) -> list[int]:
        """Return the greedy tokens of one request."""
        self.ask("tokens", **where)
        events = self.finish(self.engines[where.get("model", GENERATOR)])
        return [i for e in events if isinstance(e, TokenEvent) for i in e.token_ids]

    def finish(self, engine: Any) -> list[Any]:
        """Step an engine until it has no work; return the events."""
        events: list[Any] = []
        while engine.has_work():
            events += engine.step() or ()
        self.note(events)
        return events

    def note(self, events: Sequence[Any]) -> None:
        """Keep the errors among events."""
        self.failed |= {
            event.request_id: event.error for event in events if isinstance(event, ErrorEvent)
        }

    def vector(self) -> list[float]:
        """Return an embedding; [] if the batch failed."""
        engine = self.engines[EMBEDDER]
        self.num_inputs += 1
        # Each is another one, because results are cached.
        inputs = (PoolingInput(tuple(range(5, 25 + self.num_inputs))),)
        engine.submit(PoolRequest(request_id="v", model=EMBEDDER, inputs=inputs))
        (event,) = self.finish(engine)
        return event.results[0].tolist() if isinstance(event, PoolingEvent) else []

    def train(self) -> Any:
        """Open a session; return what came of it."""
        op = OpenTraining(
            model=EMBEDDER,
            session="s",
            spec=TrainableSpec(),
            distribution=Distribution.GAUSSIAN,
            cache_bytes=1 << 20,
        )
        self.training.submit(
            TrainingRequest(request_id="t", model=EMBEDDER, session="s", ops=(op,))
        )
        (event,) = self.finish(self.training)
        return event


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


#: ``HEARD_BY``: the model and class of an op that raises the error, what runs it, and whose it is.
HEARD_BY: dict[str, tuple[tuple[str, type], Callable[[Served], Any], str]] = {
    "its next step": ((GENERATOR, Step), lambda served: served.tokens(adapter="adapter"), "tokens"),
    "another generator": ((OTHER, Step), lambda served: served.tokens(model=OTHER), "tokens"),
    "a pooling model": ((EMBEDDER, PoolBatch), Served.vector, "v"),
    "a training session": ((EMBEDDER, OpenTraining), Served.train, "t"),
}


@pytest.mark.parametrize("heard_by", HEARD_BY)
def test_a_step_in_flight_is_lost_and_later_answers_are_right(
    served: Served, heard_by: str
) -> None:
    failing, work, own = HEARD_BY[heard_by]
    before = served.tokens(), served.tokens(adapter="adapter"), served.tokens(model=OTHER)
    assert all(len(tokens) == NUM_TOKENS for tokens in before)
    generator = served.engines[GENERATOR]
    served.ask("in flight")
    for _ in range(3):
        generator.step()
    served.worker.failing = failing
    work(served)
    served.finish(generator)
    assert served.worker.failing is None, "the op was not run"
    assert set(served.failed) == {"in flight", own}
    assert all(isinstance(error, StepError) for error in served.failed.values())
    served.failed.clear()
    after = served.tokens(), served.tokens(adapter="adapter"), served.tokens(model=OTHER)
    assert after == before
    assert served.vector()
    assert isinstance(served.train(), TrainingEvent)
    generator._scheduler.check_integrity()


class FailedDevice:
    """A device whose work failed after it was submitted, which MLX raises once when it is asked."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = RuntimeError(f"{LATE}: Insufficient Memory.")

    def synchronize(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


def _settle(served: Served) -> None:
    served.note(served.engines[GENERATOR].settle())


def _run_out_of_work(served: Served) -> None:
    # A step is begun and nothing follows it, as when no blocks are free.
    scheduler = served.engines[GENERATOR]._scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", lambda **_: None)
        served.note(served.engines[GENERATOR].step())


#: ``ENDS``: how a step ends that no other follows.
ENDS = {"settled chunk": _settle, "last chunk": _run_out_of_work}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_chunk_that_no_step_follows_fails_with_its_device(
    served: Served, end: Callable[[Served], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The chunk chooses no token, so that no output of it is read. Its device failed at once, which
    # no array says that is complete.
    generator = served.engines[GENERATOR]
    served.ask("chunk", first_id=120)
    generator.step()
    mx.synchronize()
    device = FailedDevice()
    monkeypatch.setattr(mx, "synchronize", device.synchronize)
    end(served)
    assert set(served.failed) == {"chunk"}
    assert device.error is None
    assert served.vector(), "a pooling model hears of it no more"
    served.failed.clear()
    num_found = generator.stats.prefix_hits
    assert len(served.tokens(first_id=120)) == NUM_TOKENS
    assert generator.stats.prefix_hits == num_found, "a block of the chunk is found"
    generator._scheduler.check_integrity()
    served.engines[GENERATOR].reset_cache()


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_runner_of_ranks_fails_without_waiting_for_its_device(
    may_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The device may wait for the sum of a rank that is lost; the error must end all ranks.
    loaded, attention = loaded_model("llama"), AheadAttention(16)
    layouts = probe_layout(loaded.model)
    cache, scheduler = CacheConfig(block_size=16), SchedulerConfig()
    plan = plan_kv(layouts, loaded.config, cache, scheduler, 32, attention)
    faults = DeviceFaults(may_wait=may_wait)
    runner = at_once(make_runner)(loaded, layouts, plan, 4, attention, faults=faults)[0]
    chunk = ScheduledSequence(seq_id=1, slot=0, start=0, token_ids=(5, 6), block_table=(0,))
    step = runner.submit(ScheduledBatch(step_id=0, sequences=(chunk,)))
    calls: list[str] = []
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(runner._path, "forget_writes", lambda: calls.append("forget_writes"))
    faults.count += 1
    with pytest.raises(StepError, match="in flight"):
        step.wait()
    # Forgetting evaluates arrays, behind what the device is at work on.
    assert calls == (["synchronize", "forget_writes"] if may_wait else [])
