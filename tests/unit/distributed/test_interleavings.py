"""Random requests, aborts, updates, pauses and unloads over two ranks: as in one process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.device import DeviceAdapters, DeviceWeights
from mlx_parallm.engine.live_weights import LiveWeights, WeightsUpdate
from mlx_parallm.engine.policies import AdapterUpload, Policies
from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.errors import InvalidRequestError, OutOfMemoryError, OverloadedError
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, TokenEvent
from mlx_parallm.types.request import SLEEP_TAGS, GenerateRequest, SamplingParams
from mlx_parallm.worker.ops import Allocate, Load, Unload
from mlx_parallm.worker.worker import Worker
from tests.fakes import make_info
from tests.rank_simulator import NO_MEMORY, REFUSED, WEIGHT, SimulatedSpec
from tests.scheduler_harness import make_kv
from tests.simulated_world import lone_worker, simulated_world
from tests.version_harness import NUM_SNAPSHOTS, NoMetrics, Tokenizer

# Each refusal for lack of memory searches for garbage.
pytestmark = pytest.mark.usefixtures("short_searches_for_garbage")

NUM_PARTS = 4
RUNS_PER_PART = 75
MODEL = "m"
BLOCK_SIZE = 4
MAX_LEN = 48
#: Prompts are cut from a few texts, so that prefixes are often shared.
TEXTS = tuple(tuple((7 * i + 13 * text) % 47 + 1 for i in range(30)) for text in range(2))
NAMES = ("p", "q", "r")
REFUSALS = tuple(
    f"{REFUSED}{ranks}{mark}" for ranks in ("0", "1", "01") for mark in ("", NO_MEMORY)
)
CONTENTS = ("d0", "d1", "d2", "d3", *REFUSALS)
NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
)
TENSOR = HostTensor(np.ones((1, 1), np.float32))
ADAPTER = AdapterWeights({"layer": LowRank(kind="linear", a=TENSOR, b=TENSOR, scale=1.0)})


@dataclass
class Settings:
    """The settings of a run."""

    scheduler: SchedulerConfig
    num_blocks: int
    runs_ahead: bool
    has_state: bool
    speculative: SpeculativeConfig | None

    @classmethod
    def draw(cls, randomness: Random) -> Settings:
        """Return random ones."""
        speculative = randomness.choice([None, None, NGRAM])
        return cls(
            SchedulerConfig(
                max_num_seqs=randomness.choice([2, 4, 8]),
                max_num_batched_tokens=randomness.choice([6, 16, 64]),
                max_loras=randomness.choice([1, 2, 3]),
            ),
            num_blocks=randomness.choice([12, 20, 60]),
            runs_ahead=randomness.random() < 0.6,
            has_state=speculative is None and randomness.random() < 0.2,
            speculative=speculative,
        )

    def build(self, worker: Worker) -> GenerationEngine:
        """Load the model into a worker, and return its engine."""
        info = make_info(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN,
            has_state=self.has_state,
            runs_ahead=self.runs_ahead,
        )
        copies = self.speculative is not None
        spec = SimulatedSpec(info, self.scheduler.max_num_seqs + NUM_SNAPSHOTS, copies)
        worker.execute(Load(model=MODEL, spec=spec))
        plan: Any = worker.execute(Allocate(model=MODEL, num_blocks=self.num_blocks))
        scheduler = Scheduler(
            self.scheduler,
            make_kv(
                self.num_blocks,
                BLOCK_SIZE,
                num_seqs=self.scheduler.max_num_seqs,
                num_snapshots=NUM_SNAPSHOTS if self.has_state else None,
            ),
            max_model_len=MAX_LEN,
            has_state=self.has_state,
            snapshot_tokens=8,
            speculative=self.speculative,
        )
        policies = Policies(
            model=MODEL,
            users=scheduler,
            store=DeviceAdapters(worker, MODEL),
            max_loaded=3,
            max_rank=8,
        )
        return GenerationEngine(
            scheduler,
            DeviceRunner(worker, MODEL, plan),
            Tokenizer(),
            cast("EngineMetrics", NoMetrics()),
            live=LiveWeights(policies, DeviceWeights(worker, MODEL), scheduler),
        )


@dataclass
class Interleaving:
    """One random order of everything that may happen, by a worker of one or of several ranks.

    Attributes:
        heard: all that came of it, in order.
        seen: how often things happened that the test wants to see.
    """

    seed: int
    worker: Worker
    heard: list[Any] = field(default_factory=list[Any])
    seen: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.settings = Settings.draw(self.random)
        self.engine = self.settings.build(self.worker)
        self.running: set[str] = set()
        self.staging: AdapterStaging | None = None
        self._numbers = count()

    def run(self, num_events: int = 28) -> None:
        """Let it happen."""
        events: list[tuple[Callable[[], None], float]] = [
            (self.step, 10),
            (self.add, 6),
            (self.abort, 1),
            (self.load, 3),
            (self.stage, 2),
            (self.unload, 1),
            (self.prepare, 2),
            (self.commit, 2),
            (self.give_up, 1),
            (self.checksums, 0.5),
            (self.pause, 1),
            (self.sleep, 0.5),
            (self.reset, 0.5),
            (self.load_model, 0.3),
        ]
        actions, weights = zip(*events, strict=True)
        for action in self.random.choices(actions, weights, k=num_events):
            action()
        self.end()

    def end(self) -> None:
        """Let all requests end, and unload everything."""
        self.wake()
        self.drop_staging()
        while self.engine.has_work():
            self.step()
        assert not self.running
        self.give_up()
        for info in self.live.policies.infos():
            self.live.policies.unload(info.name)
        self.worker.execute(Unload(model=MODEL))

    @property
    def live(self) -> LiveWeights:
        """The weights of the model."""
        assert self.engine.live is not None
        return self.engine.live

    def step(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            if self.engine.has_work():
                events = self.engine.step()
                # An adapter that is being put into a slot may keep all requests waiting.
                assert events is not None or self.staging, "there is work, but nothing runs"
                self.hear(events or [])

    def hear(self, events: list[GenerateEvent]) -> None:
        """Note events."""
        self.heard += events
        for event in events:
            assert not isinstance(event, ErrorEvent), event
            if isinstance(event, TokenEvent):
                self.seen["tokens"] += len(event.token_ids)
        self.running = {each for each in self.running if self.is_running(each)}

    def is_running(self, request_id: str) -> bool:
        """True if a request has not ended."""
        return any(each == request_id for each in self.engine._processor._requests)

    def add(self) -> None:
        names = [info.name for info in self.live.policies.infos()]
        number, choose = next(self._numbers), self.random.choice
        request = GenerateRequest(
            request_id=f"r{number}",
            model=MODEL,
            adapter=choose([None, *names]),
            prompt_ids=choose(TEXTS)[: choose([1, 4, 9, 13, 24, 30])],
            params=SamplingParams(
                n=choose([1, 1, 2, 4]),
                max_tokens=choose([0, 1, 5, 12, 12]),
                ignore_eos=self.random.random() < 0.8,
                seed=self.random.randint(0, 3),
                prompt_logprobs=choose([None, None, 1]),
            ),
        )
        self.engine.submit(request)
        self.running.add(request.request_id)

    def abort(self) -> None:
        if self.running:
            request_id = self.random.choice(sorted(self.running))
            self.seen["aborted"] += self.engine.abort(request_id)
            self.running.discard(request_id)

    def try_to(self, action: Callable[[], object]) -> bool:
        """Do what ranks may refuse; False if one has, which must change nothing."""
        policies, version = self.live.policies, self.live.version
        before = [(info.name, info.digest) for info in policies.infos()]
        try:
            action()
        except (InvalidRequestError, OutOfMemoryError, OverloadedError) as refusal:
            assert before == [(info.name, info.digest) for info in policies.infos()]
            assert self.live.version == version
            self.heard.append("refused")
            self.seen["refused"] += REFUSED in str(refusal)
            return False
        return True

    def upload(self) -> AdapterUpload:
        """Return an adapter to be loaded."""
        return AdapterUpload(
            name=self.random.choice(NAMES),
            weights=ADAPTER,
            version=f"v{next(self._numbers)}",
            replaces=True,
            source="folder",
            opaque=self.random.choice(CONTENTS),
        )

    def load(self) -> None:
        upload = self.upload()
        self.seen["loaded"] += self.try_to(lambda: self.live.policies.load(upload))

    def stage(self) -> None:
        """Begin to put an adapter into a slot, go on with it, or let requests use it."""
        if self.staging is None:
            upload = self.upload()

            def begin() -> None:
                self.staging = AdapterStaging(upload, self.live.policies)

            self.try_to(begin)
        elif not self.staging.advance():
            self.seen["staged"] += self.try_to(self.staging.commit)
            self.drop_staging()

    def drop_staging(self) -> None:
        if self.staging is not None:
            self.staging.drop()
            self.staging = None

    def unload(self) -> None:
        names = [info.name for info in self.live.policies.infos()]
        if names:
            self.live.policies.unload(self.random.choice(names))

    def prepare(self) -> None:
        content = self.random.choice(("b0", "b1", "b2", *REFUSALS))
        update = WeightsUpdate(
            tensors={f"{WEIGHT}{content}": TENSOR}, version=f"base{next(self._numbers)}"
        )
        self.seen["prepared"] += self.try_to(lambda: self.live.prepare(update))

    def commit(self) -> None:
        """Commit what was prepared, as the command does."""
        self.seen["committed in flight"] += self.engine._in_flight is not None
        self.hear(self.engine.settle())
        self.seen["committed"] += self.try_to(self.live.commit)

    def give_up(self) -> None:
        """Do what happens where a trainer is gone between both phases."""
        self.seen["given up"] += self.live._prepared is not None
        self.live.drop_prepared()

    def checksums(self) -> None:
        if not self.live.asleep:
            self.heard.append(self.live.checksums())

    def pause(self) -> None:
        if self.live.asleep:
            return
        self.engine.is_paused = not self.engine.is_paused
        self.hear(self.engine.settle())

    def sleep(self) -> None:
        if self.live.asleep:
            self.wake()
            return
        self.engine.is_paused = True
        self.hear(self.engine.settle())
        self.live.sleep(self.random.choice([1, 2]))
        self.seen["asleep"] += 1

    def wake(self) -> None:
        self.live.wake(SLEEP_TAGS)
        self.engine.is_paused = False

    def reset(self) -> None:
        self.hear(self.engine.settle())
        self.engine.reset_cache(reset_running=self.random.random() < 0.5)

    def load_model(self) -> None:
        """Unload the model while requests run, and load it anew."""
        self.hear(self.engine.settle())
        for request_id in sorted(self.running):
            self.engine.abort(request_id)
        self.running.clear()
        self.staging = None
        self.engine.release()
        self.worker.execute(Unload(model=MODEL))
        self.engine = self.settings.build(self.worker)
        self.seen["loaded anew"] += 1


def run(seed: int) -> Counter[str]:
    """Compare one interleaving over two ranks with the same in one process."""
    with simulated_world() as world:
        ranks = Interleaving(seed, world.worker)
        ranks.run()
    alone = Interleaving(seed, lone_worker())
    alone.run()
    assert ranks.heard == alone.heard
    return ranks.seen


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))]
)
def test_two_ranks_do_what_one_process_does(part: int, caplog: pytest.LogCaptureFixture) -> None:
    # A rank logs each refusal with its traceback.
    caplog.set_level(logging.CRITICAL, logger="mlx_parallm")
    seen = Counter[str]()
    for seed in range(part * RUNS_PER_PART, (part + 1) * RUNS_PER_PART):
        try:
            seen += run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    wanted = ["tokens", "aborted", "refused", "loaded", "staged", "prepared", "committed"]
    wanted += ["committed in flight", "given up", "asleep", "loaded anew"]
    assert all(seen[case] >= 5 for case in wanted), seen


@pytest.mark.parametrize("refusal", REFUSALS)
def test_many_refusals_leave_nothing_behind(refusal: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="mlx_parallm")
    with simulated_world() as world:
        engine = Settings.draw(Random(0)).build(world.worker)
        live = engine.live
        assert live is not None
        update = WeightsUpdate(tensors={f"{WEIGHT}{refusal}": TENSOR})
        upload = AdapterUpload(name="p", weights=ADAPTER, opaque=refusal)
        refused = pytest.raises((InvalidRequestError, OutOfMemoryError), match=REFUSED)
        for _ in range(100):
            with refused:
                live.prepare(update)
            with refused:
                live.policies.load(upload)
            # A trainer that is gone between both phases.
            live.prepare(WeightsUpdate(tensors={f"{WEIGHT}b0": TENSOR}))
            live.drop_prepared()
        assert live.version.label == "default"
        assert live.checksums() == {"content": ""}
        world.worker.execute(Unload(model=MODEL))
        models = [loader.model for loader in world.loaders]
    for model in models:
        assert model is not None
        assert not model.adapters
        assert model.prepared is None
