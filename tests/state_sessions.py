"""Tiny models with a state: sessions that keep snapshots, and sessions without a prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.request import (
    BaseWeights,
    GenerateRequest,
    PolicyWeights,
    SamplingParams,
    WeightsVersion,
)
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import LoadedModel
from mlx_parallm.worker.weights.model_weights import parameters_of
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.integration.test_parity_generate import BLOCK_SIZE, Session
from tests.scheduler_harness import make_kv

#: BACKENDS of attention by name.
BACKENDS: dict[str, Callable[[int], ReferenceAttention]] = {
    "reference": ReferenceAttention,
    "int8": lambda size: QuantisedReferenceAttention(size, KVQuantisation(bits=8)),
    "runs ahead": AheadAttention,
    "compiled": CompiledAttention,
}
NUM_BLOCKS = 96
MAX_SEQS = 8
#: TOLERANCE: largest difference of log-probabilities from those without a prefix cache, where
#: prompts are cut elsewhere. The order of sums is the processor's: up to 1.2e-5 with OpenBLAS's
#: kernels for Haswell and Zen, below 1e-5 with those for AVX-512. Wrong states differ by over 1e-3.
TOLERANCE = 5e-5
#: QUANTISED_TOLERANCE: the same where a sum may also move a value to the next step of eight bits.
QUANTISED_TOLERANCE = 3e-4


@dataclass(frozen=True)
class Answer:
    """A sample's tokens, their log-probabilities, and its cached prompt tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    def is_like(self, other: Answer, tolerance: float = TOLERANCE) -> bool:
        """True if the tokens are equal, and their log-probabilities but for rounding."""
        return self.tokens == other.tokens and np.allclose(
            self.logprobs, other.logprobs, rtol=0, atol=tolerance
        )


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        prompt: its tokens.
        params: fields of ``SamplingParams`` that differ from greedy decoding of six tokens.
        seed: of its first sample.
        adapter: whether it is computed with the adapter.
        fields: fields of ``GenerateRequest``.
    """

    prompt: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    adapter: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


class StateModel:
    """A runner of a tiny model, whose weights have numbered versions, and an adapter."""

    def __init__(self, architecture: str, backend: str, *, speculates: bool) -> None:
        self.runner = _new_runner(architecture, backend, speculates=speculates)
        self.base = BaseWeights()
        version = WeightsVersion(content="adapter", label="adapter")
        self.adapted = PolicyWeights(base=self.base, adapter=version)
        self.plain = PolicyWeights(base=self.base)
        self._original: dict[str, np.ndarray] = {}
        self._has_adapter = False

    @property
    def parameters(self) -> Mapping[str, mx.array]:
        """The weights by name."""
        live: Any = self.runner.live
        return parameters_of(live._weights._model)

    def put(self, version: int) -> None:
        """Replace the weights of norms by those of a version; 0 is the first."""
        if not self._original:
            names = [name for name in self.parameters if "norm" in name]
            self._original = {name: np.array(self.parameters[name]) for name in names}
        factor = np.float32(1 + version / 4)
        tensors = {name: HostTensor(factor * array) for name, array in self._original.items()}
        self.runner.live.prepare_tensors(tensors)
        self.runner.live.commit()
        self.base.version = WeightsVersion(content=f"base {version}", label=f"v{version}")

    def add_adapter(self) -> None:
        """Load the adapter, once."""
        if not self._has_adapter:
            self.runner.adapters.add("adapter", adapter_of(self.runner.stock.model))
            self._has_adapter = True


def adapter_of(model: Any) -> AdapterWeights:
    """Return an adapter of all linear layers."""
    source = np.random.default_rng(5)
    modules: dict[str, LowRank] = {}
    for path, module in model.named_modules():
        if type(module).__name__ == "Linear":
            outputs, inputs = module.weight.shape
            a, b = (
                HostTensor(source.normal(0, 0.2, shape).astype(np.float32))
                for shape in ((2, inputs), (outputs, 2))
            )
            modules[path] = LowRank(kind="linear", a=a, b=b, scale=1.0)
    return AdapterWeights(modules)


def _new_runner(architecture: str, backend: str, *, speculates: bool) -> ModelRunner:
    config = config_of(architecture)
    loaded = LoadedModel(build(config), config, Path(architecture), "float32", 0)
    layouts = probe_layout(loaded.model)
    attention = BACKENDS[backend](BLOCK_SIZE)
    plan = plan_kv(
        layouts,
        config,
        CacheConfig(block_size=BLOCK_SIZE),
        SchedulerConfig(max_num_seqs=MAX_SEQS),
        NUM_BLOCKS,
        attention,
    )
    return at_once(make_runner)(
        loaded, layouts, plan, NUM_BLOCKS, attention, speculates=speculates
    )[0]


@cache
def model_of(architecture: str, role: str, backend: str) -> StateModel:
    """Return a model; those of each role ("speculating" and others) have pools of their own."""
    return StateModel(architecture, backend, speculates=role == "speculating")


class StateSession(Session):
    """A scheduler over a tiny model, with an empty prefix cache or without one.

    Attributes:
        model: the model.
        num_run: tokens that were run so far.
    """

    def __init__(
        self,
        model: StateModel,
        *,
        caching: bool = True,
        num_blocks: int = NUM_BLOCKS,
        num_snapshots: int = 8,
        budget: int = 24,
        snapshot_tokens: int = 16,
        speculative: SpeculativeConfig | None = None,
        **scheduling: Any,
    ) -> None:
        super().__init__(model.runner)
        self.model, self.num_run = model, 0
        info = model.runner.info
        self.kv = make_kv(
            num_blocks,
            BLOCK_SIZE,
            num_seqs=MAX_SEQS,
            num_snapshots=num_snapshots,
            caching=caching,
            has_kv=info.kv_bytes > 0,
        )
        config = SchedulerConfig(
            **{"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": budget, **scheduling}
        )
        self.scheduler = Scheduler(
            config,
            self.kv,
            max_model_len=info.max_model_len,
            has_state=info.has_state,
            keeps_states=info.keeps_states,
            snapshot_tokens=snapshot_tokens,
            speculative=speculative,
        )
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._counted

    def _counted(self, *, is_shared: bool = False) -> Any:
        batch = self._schedule(is_shared=is_shared)
        self.num_run += 0 if batch is None else batch.num_tokens
        return batch

    def begin(self, name: str, ask: Ask) -> None:
        """Queue a request."""
        params = {"temperature": 0.0, "max_tokens": 6, "logprobs": 0, **ask.params}
        request = GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=ask.prompt,
            params=SamplingParams(**params),
            **ask.fields,
        )
        weights = self.model.adapted if ask.adapter else self.model.plain
        self.scheduler.add(request, seed=ask.seed, end_ids=frozenset(), weights=weights)

    def answer(self, name: str, index: int = 0) -> Answer:
        """Return a sample that has ended."""
        result = self.result(name, index)
        return Answer(tuple(result.tokens), tuple(result.logprobs), result.cached)

    def ask(self, ask: Ask) -> Answer:
        """Return the first sample of a request that runs alone."""
        name = f"request {len(self.cached)}"
        self.begin(name, ask)
        self.finish()
        return self.answer(name)


def cold(architecture: str, ask: Ask) -> Answer:
    """Return what a request gets without a prefix cache."""
    model = model_of(architecture, "cold", "reference")
    if ask.adapter:
        model.add_adapter()
    return StateSession(model, caching=False).ask(ask)


def tokens_from(seed: int, count: int) -> tuple[int, ...]:
    """Return random tokens."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 120, count))


def next_turn(prompt: Sequence[int], answer: Answer, seed: int, count: int = 13) -> tuple[int, ...]:
    """Return a prompt that continues an answer with so many tokens."""
    return (*prompt, *answer.tokens, *tokens_from(seed, count))
