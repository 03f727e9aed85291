"""Speculation changes no token, whatever else a batch has and happens to it.

Requests with images, with adapters and without run together while weights and adapters change.
Each gets the tokens that it gets alone without speculation, by the weights that its tokens were
sampled by. A follower that gets the encoded batches has the same KV, to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.distributed.codec import StepDecoder, StepEncoder
from mlx_parallm.types.request import (
    BaseWeights,
    GenerateRequest,
    PolicyWeights,
    SamplingParams,
    WeightsVersion,
)
from mlx_parallm.types.step import ScheduledBatch, StepInFlight
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.rank_steps import RankTokens
from mlx_parallm.worker.weights.model_weights import parameters_of
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.image_sessions import ImageSession, new_load, new_runner
from tests.integration.test_images_in_any_batch import NUM_PROMPTS, prompts_of, shortest_pool
from tests.integration.test_prompt_embeds import InputRunner

NGRAM = SpeculativeConfig(prompt_lookup_min=1, disable_by_batch_size=8)
DRAFT = SpeculativeConfig(method="draft_model", model="draft", disable_by_batch_size=8)
#: ADAPTERS that requests name; each has two versions.
ADAPTERS = ("x", "y")
#: WEIGHTS that can change: the base model's, or an adapter's.
CHANGES: tuple[str, ...] = ("", *ADAPTERS)
NUM_VERSIONS = 2
NEW_TOKENS = 16
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 3, "seed": 3},
    {"temperature": 0.0, "speculative": False},
    {"temperature": 0.0, "repetition_penalty": 1.2},
)
#: RUNS: models, how they run, and where proposals come from.
RUNS = (
    ("llava", ReferenceAttention, NGRAM),
    ("gemma3", AheadAttention, NGRAM),
    ("qwen2_5_vl", CompiledAttention, NGRAM),
    ("llava", ReferenceAttention, DRAFT),
    ("qwen2_5_vl", CompiledAttention, DRAFT),
)
#: TARGETS of adapters in the text model.
TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj", "lm_head")


class Segment(NamedTuple):
    """Tokens of a request that the same versions of base and adapter sampled."""

    base: int
    adapter: int
    size: int


class Task(NamedTuple):
    """A request: the number of its prompt and of its options, and its adapter."""

    prompt: int
    options: int
    adapter: str


class Model:
    """A runner of a golden model whose weights and adapters have numbered versions."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        names = [name for name in self._parameters if name.endswith("self_attn.k_proj.weight")]
        self._weights = {name: np.array(self._parameters[name]) for name in names}
        for name in ADAPTERS:
            for version in range(NUM_VERSIONS):
                runner.adapters.add(content_of(name, version), self._adapter(name, version))

    def put(self, version: int) -> None:
        """Replace the base model's weights by those of a version."""
        factor = np.float32(1 + version)
        tensors = {name: HostTensor(factor * array) for name, array in self._weights.items()}
        self.runner.live.prepare_tensors(tensors)
        self.runner.live.commit()

    @property
    def _parameters(self) -> Mapping[str, mx.array]:
        live: Any = self.runner.live
        return parameters_of(live._weights._model)

    def _adapter(self, name: str, version: int) -> AdapterWeights:
        """Return an adapter that changes nearly every token."""
        source = np.random.default_rng([*name.encode(), version])
        modules: dict[str, LowRank] = {}
        for path, weight in self._parameters.items():
            target = path.removesuffix(".weight")
            if "language_model" in path and target.rpartition(".")[2] in TARGETS:
                a, b = (
                    HostTensor(source.normal(0, 0.5, shape).astype(np.float32))
                    for shape in ((2, weight.shape[1]), (weight.shape[0], 2))
                )
                modules[target] = LowRank(kind="linear", a=a, b=b, scale=1.0)
        return AdapterWeights(modules)


def content_of(adapter: str, version: int) -> str:
    return f"{adapter}{version}"


class Follower:
    """Computes a leader's batches on a rank that does not sample, as they arrive there."""

    def __init__(self, runner: ModelRunner) -> None:
        follower: Any = runner
        second: Any = SimpleNamespace(rank=1)
        follower._ranks = RankTokens(second, runs_ahead=False)
        self.runner, self.info, self.inputs = runner, runner.info, runner.inputs
        self._encoder, self._decoder = StepEncoder(), StepDecoder()

    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        received = self._decoder.decode(self._encoder.encode(batch))
        step = self.runner.submit(received)
        step.wait()
        return step


class Leader(InputRunner):
    """Gives each batch to the follower too."""

    def __init__(self, runner: ModelRunner, follower: ModelRunner) -> None:
        super().__init__(runner)
        followed: Any = Follower(follower)
        self._follower = InputRunner(followed)

    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        step = super().submit(batch)
        self._follower.submit(batch)
        return step


@cache
def model_of(name: str, backend: type[ReferenceAttention], role: str) -> Model:
    """Return a model of its own for each role."""
    draft = new_load(name) if role == "draft_model" else None
    return Model(new_runner(new_load(name), backend, draft))


@dataclass
class Track:
    """A request that runs, and the segments of its tokens so far."""

    task: Task
    segments: list[Segment] = field(default_factory=list[Segment])

    @property
    def count(self) -> int:
        return sum(segment.size for segment in self.segments)


class History(ImageSession):
    """A session whose weights and adapters change between steps."""

    def __init__(
        self,
        name: str,
        models: Sequence[Model],
        *,
        speculative: SpeculativeConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, runner=models[0].runner, speculative=speculative, **options)
        for model in models:
            model.runner.inputs.features.clear()
        if len(models) > 1:
            self.images = self.runner = Leader(models[0].runner, models[1].runner)
        self._models = models
        self.base = BaseWeights()
        self.policies = {name: PolicyWeights(base=self.base) for name in CHANGES}
        self.versions = dict.fromkeys(CHANGES, 0)
        self.tracks: dict[str, Track] = {}
        for name in CHANGES:
            self.put(name, 0)

    def put(self, name: str, version: int) -> None:
        """Replace the weights of the base or of an adapter; called between two steps."""
        self.settle()
        self.mark()
        self.versions[name] = version
        if name:
            content = content_of(name, version)
            self.policies[name].adapter = WeightsVersion(content=content, label=content)
        else:
            for model in self._models:
                model.put(version)
            self.base.version = WeightsVersion(content=f"base-{version}", label=f"v{version}")
        self.scheduler.refresh_weights()

    def settle(self) -> None:
        """End the step in flight."""
        if self.in_flight is not None:
            schedule, self.scheduler.schedule = (
                self.scheduler.schedule,
                lambda *, is_shared=False: None,
            )
            self.step()
            self.scheduler.schedule = schedule

    def mark(self) -> None:
        """Note which weights sampled the tokens since the last mark."""
        for name, track in self.tracks.items():
            count = len(self.tokens.get((name, 0), ())) - track.count
            if count:
                adapter = self.versions[track.task.adapter] if track.task.adapter else 0
                track.segments.append(Segment(self.versions[""], adapter, count))

    def ask(self, request_id: str, task: Task) -> None:
        prompt = prompts_of(self.name)[task.prompt]
        options = {"max_tokens": NEW_TOKENS, **OPTIONS[task.options]}
        request = GenerateRequest(
            request_id=request_id,
            model="m",
            prompt_ids=prompt.ids,
            params=SamplingParams(**options),
            inputs=prompt.inputs,
        )
        self.tracks[request_id] = Track(task)
        weights = self.policies[task.adapter]
        self.scheduler.add(request, seed=5, end_ids=frozenset(), weights=weights)

    def tokens_of(self, request_id: str) -> list[int]:
        return [token.token_id for token in self.tokens[request_id, 0]]


@cache
def alone(name: str, task: Task, segments: tuple[Segment, ...]) -> list[int]:
    """Return the tokens of a request with nothing beside it, if weights change at these tokens."""
    session = History(name, [model_of(name, ReferenceAttention, "alone")], budget=256)
    for place, segment in enumerate(segments):
        session.put("", segment.base)
        if task.adapter:
            session.put(task.adapter, segment.adapter)
        if place == 0:
            session.ask("alone", task)
        end = sum(each.size for each in segments[: place + 1])
        while len(session.tokens.get(("alone", 0), ())) < end:
            session.step()
    assert not session.has_work()
    return session.tokens_of("alone")


class Event(NamedTuple):
    """A request that comes, steps after it, and weights that change after those."""

    task: Task
    steps: int
    changed: str | None


EVENTS = st.builds(
    Event,
    task=st.builds(
        Task,
        prompt=st.integers(0, NUM_PROMPTS - 1),
        options=st.integers(0, len(OPTIONS) - 1),
        adapter=st.sampled_from(CHANGES),
    ),
    steps=st.integers(0, 8),
    changed=st.sampled_from([None, None, *CHANGES]),
)


def models_for(
    name: str, backend: type[ReferenceAttention], speculative: SpeculativeConfig
) -> list[Model]:
    """Return the leader, and a follower where it does not run ahead and has no draft model."""
    models = [model_of(name, backend, speculative.method)]
    if backend is ReferenceAttention and speculative is NGRAM:
        models.append(model_of(name, backend, "follower"))
    return models


def run(
    name: str,
    backend: type[ReferenceAttention],
    speculative: SpeculativeConfig,
    events: Sequence[Event],
    **options: Any,
) -> Counter[str]:
    """Run a history, compare all tokens and KV, and return what happened in it."""
    models = models_for(name, backend, speculative)
    session = History(name, models, speculative=speculative, **options)
    for number, event in enumerate(events):
        session.ask(f"r{number}", event.task)
        for _ in range(event.steps):
            session.step()
        if event.changed is not None:
            version = 1 - session.versions[event.changed]
            session.put(event.changed, version)
    session.finish()
    session.mark()
    for request_id, track in session.tracks.items():
        wanted = alone(name, track.task, tuple(track.segments))
        assert session.tokens_of(request_id) == wanted, (request_id, track)
    if len(models) > 1:
        assert_same_kv(models)
    stats = session.scheduler.stats()
    return Counter(
        accepted=stats.speculation.num_accepted_tokens,
        refused=stats.speculation.num_draft_tokens - stats.speculation.num_accepted_tokens,
        preempted=stats.num_preemptions,
        found=stats.prefix_hits,
        straddled=sum(len(track.segments) > 1 for track in session.tracks.values()),
    )


def assert_same_kv(models: Sequence[Model]) -> None:
    leader, follower = (model.runner for model in models)
    paths: list[Any] = [leader, follower]
    for own, theirs in zip(*(path._path.arrays() for path in paths), strict=True):
        assert mx.array_equal(own, theirs), "a follower has other KV"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend", "speculative"), RUNS)
@settings(max_examples=8)
@given(events=st.lists(EVENTS, min_size=3, max_size=10), budget=st.sampled_from([16, 24, 64]))
def test_tokens_are_those_of_each_request_alone(
    name: str,
    backend: type[ReferenceAttention],
    speculative: SpeculativeConfig,
    events: list[Event],
    budget: int,
) -> None:
    run(name, backend, speculative, events, budget=budget)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend", "speculative"), RUNS)
@settings(max_examples=5)
@given(events=st.lists(EVENTS, min_size=6, max_size=12))
def test_in_a_pool_too_small_for_all(
    name: str,
    backend: type[ReferenceAttention],
    speculative: SpeculativeConfig,
    events: list[Event],
) -> None:
    # What is preempted is computed anew by the weights of that time, so none change.
    events = [event._replace(changed=None) for event in events]
    num_blocks = shortest_pool(name) + 4
    run(name, backend, speculative, events, num_blocks=num_blocks, budget=64)


def crowd(changes: Sequence[str | None]) -> list[Event]:
    """Return requests of all kinds, which come in the middle of each other."""
    return [
        Event(
            Task(number % NUM_PROMPTS, number % len(OPTIONS), CHANGES[number % len(CHANGES)]),
            steps=3,
            changed=changes[number % len(changes)],
        )
        for number in range(2 * NUM_PROMPTS)
    ]


@pytest.mark.parametrize(
    ("name", "backend", "speculative"), [RUNS[0], pytest.param(*RUNS[3], marks=pytest.mark.slow)]
)
def test_a_crowd_whose_weights_change(
    name: str, backend: type[ReferenceAttention], speculative: SpeculativeConfig
) -> None:
    seen = run(name, backend, speculative, crowd([None, "x", None, "", None, "y"]))
    assert min(seen[kind] for kind in ("accepted", "refused", "found", "straddled")) > 4, seen
