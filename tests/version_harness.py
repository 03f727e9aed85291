"""Drives an engine whose weights change, and checks which weights made what a request got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.api.turns.samples import VersionSpans
from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.engine.live_weights import LiveWeights
from mlx_parallm.engine.policies import AdapterUpload, Policies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from mlx_parallm.types.events import (
    ErrorEvent,
    FinishReason,
    GenerateEvent,
    PromptEvent,
    TokenEvent,
)
from mlx_parallm.types.pooling import OwnHead
from mlx_parallm.types.request import DEFAULT_VERSION, GenerateRequest, WeightsVersion
from mlx_parallm.types.step import Runner, RunnerInfo, ScheduledBatch, StepOutput
from tests.block_simulator import (
    END_ID,
    Choice,
    SimulatedRunner,
    choose_token,
    expected_prompt_logprobs,
)
from tests.fakes import ByteTokenizer, FakeStep, make_info
from tests.scheduler_harness import make_kv

BAD_DIGEST = "bad"
MAX_RANK = 8
# NUM_SNAPSHOTS: slots for states after prefixes.
NUM_SNAPSHOTS = 3


class DeviceError(Exception):
    """The error of a failing step."""


class Tokenizer(ByteTokenizer):
    """``END_ID`` ends."""

    eos_ids = frozenset({END_ID})


class NoMetrics:
    """Counts nothing: that would take a third of the time."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@dataclass(frozen=True)
class FakeAdapter:
    """The part of an adapter that policies and schedulers see."""

    digest: str
    rank: int = 4
    num_bytes: int = 1


def adapter(name: str, digest: str, label: str | None) -> AdapterUpload:
    """Return an upload that replaces what is there, and can be evicted."""
    return AdapterUpload(
        name=name,
        weights=cast(AdapterWeights, FakeAdapter(digest)),
        version=label,
        replaces=True,
        source="folder",
    )


class FakeStore:
    """Implements ``TensorStore`` without tensors."""

    def __init__(self) -> None:
        self.contents: set[str] = set()
        #: What adapters bring, by their contents.
        self.heads: dict[str, OwnHead] = {}

    def add(self, content: str, adapter: AdapterWeights) -> OwnHead | None:
        if content == BAD_DIGEST:
            raise InvalidRequestError("It does not fit.", param="adapter")
        self.contents.add(content)
        return self.heads.get(content)

    def stage(self, slot: int, content: str) -> bool:
        assert content in self.contents
        return False

    def remove(self, content: str) -> None:
        self.contents.remove(content)


class SlotRecord(FakeStore):
    """Stands in for ``DeviceAdapters``: a staged adapter takes two turns."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, str] = {}
        self._begun: set[str] = set()

    def stage(self, slot: int, content: str) -> bool:
        is_first = content not in self._begun
        self._begun ^= {content}
        if not is_first:
            self.slots[slot] = content
        return is_first

    def ensure(self, contents: Iterable[str]) -> None:
        assert set(contents) <= self.contents

    def place(self, slots: Mapping[int, str]) -> None:
        """Do what a batch that names these slots does."""
        assert set(slots.values()) <= self.contents
        self.slots |= slots

    def release(self) -> None:
        self.slots.clear()


@dataclass(eq=False)
class Weights:
    """The weights that requests of one name must be computed with."""

    label: str
    digest: str = ""


@dataclass
class Heard:
    """One sample's tokens, and what chose them."""

    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class Tracked:
    """A request, what it is computed with and was since it came, and what was heard of it."""

    request: GenerateRequest
    weights: Weights
    first_id: int
    history: list[tuple[str, str]] = field(default_factory=list)
    samples: dict[int, Heard] = field(default_factory=dict)
    prompt: PromptEvent | None = None
    is_scored: bool = False

    @property
    def has_ended(self) -> bool:
        return all(sample.finish is not None for sample in self.samples.values())


class VersionHarness(Runner):
    """An engine over a simulated runner, and the requests and adapters given to it.

    Attributes:
        tracked: requests that have not ended.
        names: the loaded adapters.
        ended: prompt and output of the samples that ended.
        seen: how often things happened that a test wants to see.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int = 40,
        block_size: int = 4,
        max_model_len: int = 48,
        has_state: bool = False,
        keeps_states: bool = False,
        has_kv: bool = True,
        num_snapshots: int = NUM_SNAPSHOTS,
        caching: bool = True,
        runs_ahead: bool = False,
        speculative: SpeculativeConfig | None = None,
        max_loaded: int = 3,
    ) -> None:
        self._config = config
        self._copies = speculative is not None
        self._has_state = has_state
        self.info: RunnerInfo = make_info(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            has_state=has_state,
            runs_ahead=runs_ahead,
        )
        self._simulated = SimulatedRunner(
            num_blocks,
            block_size,
            config.max_num_seqs + num_snapshots,
            has_state=has_state,
            keeps_states=keeps_states,
            has_kv=has_kv,
            copies=self._copies,
        )
        self._simulated.key_of = self._key_of
        self.kv = make_kv(
            num_blocks,
            block_size,
            caching=caching,
            has_kv=has_kv,
            num_seqs=config.max_num_seqs,
            num_snapshots=num_snapshots if has_state else None,
        )
        self.scheduler = Scheduler(
            config,
            self.kv,
            max_model_len=max_model_len,
            has_state=has_state,
            keeps_states=keeps_states,
            snapshot_tokens=8,
            speculative=speculative,
        )
        self.store = FakeStore()
        self.policies = Policies(
            model="m",
            users=self.scheduler,
            store=self.store,
            max_loaded=max_loaded,
            max_rank=MAX_RANK,
        )
        self.engine = GenerationEngine(
            self.scheduler,
            self,
            Tokenizer(),
            cast(EngineMetrics, NoMetrics()),
            live=LiveWeights(self.policies, cast(Any, None), self.scheduler),
        )
        self.plain = Weights(DEFAULT_VERSION)
        self.names: dict[str, Weights] = {}
        self.tracked: dict[str, Tracked] = {}
        self.seen = Counter[str]()
        self.ended: list[tuple[int, ...]] = []
        self.fails_next = False
        self._keys: list[str | None] = []
        self._broken: AssertionError | None = None
        self._base = ""
        self._next_id = 0

    def submit(self, batch: ScheduledBatch) -> FakeStep:
        """Implements ``Runner``: check a batch and run it."""
        try:
            return self._submit(batch)
        except AssertionError as broken:
            # The engine would make it an error of the batch's requests.
            self._broken = broken
            raise

    def _submit(self, batch: ScheduledBatch) -> FakeStep:
        self._check_adapters(batch)
        if self.fails_next:
            self.fails_next = False
            self._simulated.corrupt(batch)
            raise DeviceError
        output = self._run(batch)
        for row in batch.sequences:
            self._check_row(row.seq_id, row.version, self._simulated.content_of(row))
        return FakeStep(output, lambda: None)

    def _run(self, batch: ScheduledBatch) -> StepOutput:
        return self._simulated.run(batch)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request."""
        weights = self.plain if request.adapter is None else self.names[request.adapter]
        tracked = Tracked(request, weights, self._next_id)
        tracked.samples = {index: Heard() for index in range(request.params.n)}
        tracked.history.append(self._current(weights))
        self._next_id += request.params.n
        self._keys += [request.cache_salt] * request.params.n
        self.tracked[request.request_id] = tracked
        self.engine.submit(request)

    def _key_of(self, seq_id: int) -> str | None:
        return self._keys[seq_id]

    def cancel(self, request_id: str) -> None:
        """End a request and hear its last events."""
        self._hear(self.engine.cancel(request_id))
        assert request_id not in self.tracked

    def abort(self, request_id: str) -> None:
        """End a request and hear no more of it."""
        assert self.engine.abort(request_id)
        del self.tracked[request_id]

    def load(self, name: str, digest: str, label: str, *, is_pinned: bool | None = None) -> bool:
        """Load or replace an adapter; False if it was refused, which must change nothing."""
        upload = replace(adapter(name, digest, label), is_pinned=is_pinned)
        before = [(info.name, info.version) for info in self.policies.infos()]
        try:
            info = self.policies.load(upload)
        except (InvalidRequestError, OverloadedError):
            assert before == [(info.name, info.version) for info in self.policies.infos()]
            return False
        assert (info.version, info.digest) == (label, digest)
        weights = self.names.setdefault(name, Weights(label, digest))
        weights.label, weights.digest = label, digest
        loaded = {info.name for info in self.policies.infos()}
        for gone in self.names.keys() - loaded:
            self.seen["evicted"] += 1
            del self.names[gone]
        self._note_change()
        return True

    def unload(self, name: str) -> None:
        """Unload an adapter; requests that have it go on."""
        self.policies.unload(name)
        self.seen["unloaded while used"] += any(
            tracked.weights is self.names[name] for tracked in self.tracked.values()
        )
        del self.names[name]

    def replace_base(self, content: str, label: str) -> None:
        """Give the model other weights."""
        self._base = self._simulated.base = content
        self.plain.label = label
        self.policies.replace_base(WeightsVersion(content, label))
        self._note_change()

    def pause(self) -> None:
        """Pause and keep the requests."""
        self.engine.is_paused = True
        self._hear(self.engine.settle())

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Reset the prefix cache as the command does."""
        self._hear(self.engine.settle())
        self.engine.reset_cache(reset_running=reset_running)

    def step(self) -> None:
        """Step the engine as its thread does."""
        if self.engine.has_work():
            events = self.engine.step()
            assert events is not None, "there is work, but nothing runs"
            self._hear(events)
        if self._broken is not None:
            raise self._broken
        self.scheduler.check_integrity()

    def drain(self, limit: int = 3000) -> None:
        """Step until nothing is left; nothing of any adapter that went away must remain."""
        self.engine.is_paused = False
        for _ in range(limit):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "it does not end"
        assert not self.tracked, "a sample was never reported as ended"
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
        digests = {version.digest for version in self.names.values()}
        assert self.store.contents == digests, "tensors that no name has"
        assert set(self.scheduler.adapters.resident) <= digests, "a slot that no name needs"
        infos = {info.name: (info.version, info.digest) for info in self.policies.infos()}
        assert infos == {
            name: (version.label, version.digest) for name, version in self.names.items()
        }

    def _current(self, weights: Weights) -> tuple[str, str]:
        return weights.label, f"{self._base}/{weights.digest}"

    def _note_change(self) -> None:
        for tracked in self.tracked.values():
            current = self._current(tracked.weights)
            if tracked.history[-1] != current:
                tracked.history.append(current)

    def _check_adapters(self, batch: ScheduledBatch) -> None:
        assert len(set(batch.adapters.values())) == len(batch.adapters), "in two slots"
        assert all(1 <= slot <= self._config.max_loras for slot in batch.adapters)
        assert set(batch.adapters.values()) <= self.store.contents, "tensors that are gone"
        used = {row.adapter_slot for row in batch.sequences} - {0}
        assert used == batch.adapters.keys()
        self.seen["several adapters in a batch"] += len(used) > 1

    def _check_row(self, seq_id: int, version: str, content: str) -> None:
        for tracked in self.tracked.values():
            if 0 <= seq_id - tracked.first_id < tracked.request.params.n:
                assert (version, content) == tracked.history[-1], "not the weights of its name"
                return
        # Only the step that ran ahead still has a sample that has ended, and it was checked.
        raise AssertionError("a row of a request that has ended")

    def _hear(self, events: list[GenerateEvent]) -> None:
        for event in events:
            tracked = self.tracked[event.request_id]
            match event:
                case PromptEvent():
                    assert tracked.prompt is None
                    tracked.prompt = event
                case TokenEvent():
                    self._hear_token(tracked, event)
                case ErrorEvent():
                    self.seen["failed"] += 1
                    del self.tracked[event.request_id]
            if event.request_id in self.tracked and tracked.has_ended:
                del self.tracked[event.request_id]

    def _hear_token(self, tracked: Tracked, event: TokenEvent) -> None:
        sample = tracked.samples[event.index]
        assert sample.finish is None
        for token in event.token_ids:
            self._take_token(tracked, event, sample, token)
        if tracked.prompt is not None and not tracked.is_scored:
            self._check_prompt(tracked, tracked.prompt, sample)
        sample.finish = event.finish_reason
        if sample.finish is not None:
            self._check_sample(tracked, sample, event.index)

    def _take_token(self, tracked: Tracked, event: TokenEvent, sample: Heard, token: int) -> None:
        request = tracked.request
        prefix = [*request.prompt_ids, *sample.tokens]
        choice = self._simulated.choices[tracked.first_id + event.index, len(prefix)]
        params = request.params
        ends = frozenset() if params.ignore_eos else frozenset({END_ID})
        banned = ends if len(sample.tokens) < params.min_tokens else frozenset[int]()
        seed = (params.seed or 0) + event.index
        expected = choose_token(prefix, seed, banned, copies=self._copies, content=choice.content)
        assert token == expected, "a token that its weights would not choose"
        sample.tokens.append(token)
        sample.versions.append(event.version)
        sample.choices.append(choice)
        # The sample so far says by which weights it was computed, whole.
        made_by = {choice.content for choice in sample.choices}
        assert choice.read <= made_by, "KV of weights that the sample has no token of"
        self.seen["mixed KV"] += len(choice.read) > 1

    def _check_prompt(self, tracked: Tracked, prompt: PromptEvent, sample: Heard) -> None:
        tracked.is_scored = True
        self.seen["cached"] += prompt.num_cached_tokens > 0
        assert prompt.num_cached_tokens < len(tracked.request.prompt_ids)
        if tracked.request.params.prompt_logprobs is None:
            return
        assert prompt.prompt_logprobs is not None
        contents = [sample.choices[0].content] if sample.choices else []
        # A request of no tokens is scored by what its history had at some time.
        candidates = contents or [content for _, content in tracked.history]
        scored = [expected_prompt_logprobs(tracked.request, candidate) for candidate in candidates]
        assert list(prompt.prompt_logprobs) in scored, "scored by several versions"
        self.seen["scored"] += 1

    def _check_sample(self, tracked: Tracked, sample: Heard, index: int) -> None:
        pairs = [
            (version, choice.content)
            for version, choice in zip(sample.versions, sample.choices, strict=True)
        ]
        # In the order in which its name had them, none before it came.
        place = 0
        for pair in pairs:
            place = tracked.history.index(pair, place)
        spans = VersionSpans()
        for version in sample.versions:
            spans.add(version, 1)
        covered = [label for span in spans.to_json() for label in _labels(span)]
        assert covered == sample.versions
        self.ended.append((*tracked.request.prompt_ids, *sample.tokens))
        self.seen["straddled"] += len(set(pairs)) > 1
        self.seen["whole"] += len(set(pairs)) == 1


def _labels(span: dict[str, Any]) -> list[str]:
    return [span["version"]] * (span["end"] - span["start"])
