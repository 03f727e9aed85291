"""The runner with the real scheduler, against mlx_lm's generation of each prompt alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

from mlx_parallm.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.request import GenerateRequest, PolicyWeights, SamplingParams
from mlx_parallm.types.step import SampledToken, ScheduledBatch, StepInFlight, StepTracer
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.dispatcher import Dispatcher, ThreadDispatcher
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import LoadedModel
from tests.builders.architectures.configs import WINDOW, config_of, decoder_of
from tests.compiled_attention import AheadAttention, CompiledAttention, OrderedAttention
from tests.scheduler_harness import make_kv

PATHS = {
    "llama": "packed",
    "llama-4bit": "packed",
    "mistral": "packed",
    "qwen2": "packed",
    "qwen3": "packed",
    "phi3": "packed",
    "gemma2": "packed",
    "gemma3_text": "packed",
    "gemma3n": "packed",
    "gemma4_text": "packed",
    "gemma4": "packed",
    "gpt_oss": "packed",
    "gpt2": "packed",
    "opt": "packed",
    "opt-350m": "packed",
    "opt-4bit": "packed",
    "qwen3_moe": "packed",
    "olmoe": "packed",
    "deepseek_v3": "split",
    "qwen3_next": "split",
    "qwen3_5": "split",
    "mamba2": "split",
    "lfm2": "split",
}
STATELESS = ("llama", "gemma3_text", "gemma3n", "gpt_oss", "opt", "opt-350m", "deepseek_v3")
NEW_TOKENS = 6
BLOCK_SIZE = 4
# NUM_SNAPSHOTS: slots for the states after prefixes, of models that keep one.
NUM_SNAPSHOTS = 3


@dataclass(frozen=True)
class Generated:
    """A sample's tokens with their log-probabilities, and its cached tokens."""

    tokens: list[int]
    logprobs: list[float]
    cached: int = 0


def build_model(name: str) -> tuple[Any, dict[str, Any]]:
    architecture = {"mistral": "llama"}.get(name, name.removesuffix("-350m").removesuffix("-4bit"))
    config = config_of(architecture)
    if name == "mistral":
        config["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if name == "opt-350m":
        config |= {"word_embed_proj_dim": 32, "do_layer_norm_before": False}
    mx.random.seed(7)
    model = decoder_of(config, architecture)
    # Norms and biases start as ones and zeros, which would hide mistakes.
    model.update(tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape), model.parameters()))
    if name.endswith("-4bit"):
        nn.quantize(model, group_size=32, bits=4)
    model.eval()
    mx.eval(model.parameters())
    return model, config


@cache
def loaded_model(name: str) -> LoadedModel:
    model, config = build_model(name)
    return LoadedModel(model, config, Path(name), "float32", 0)


@cache
def shared_runner(
    name: str,
    backend: type[ReferenceAttention] = ReferenceAttention,
    *,
    speculates: bool = False,
    dispatcher: type[Dispatcher] = Dispatcher,
    tracer: StepTracer | None = None,
) -> ModelRunner:
    loaded = loaded_model(name)
    layouts = probe_layout(loaded.model)
    scheduler = SchedulerConfig(max_num_seqs=8)
    attention = backend(BLOCK_SIZE)
    cache = CacheConfig(block_size=BLOCK_SIZE)
    plan = plan_kv(layouts, loaded.config, cache, scheduler, 96, attention)
    return at_once(make_runner)(
        loaded,
        layouts,
        plan,
        96,
        attention,
        speculates=speculates,
        dispatcher=dispatcher(),
        tracer=tracer,
    )[0]


@cache
def alone(name: str, prompt: tuple[int, ...]) -> Generated:
    """Return mlx_lm's greedy tokens for one prompt."""
    tokens, logprobs = [], []
    steps = generate_step(mx.array(prompt), loaded_model(name).model, max_tokens=NEW_TOKENS)
    for token, row in steps:
        tokens.append(int(token))
        logprobs.append(float(row[token]))
    return Generated(tokens, logprobs)


class Session:
    """A scheduler over a runner, fed by hand."""

    def __init__(
        self,
        runner: Any,
        *,
        num_blocks: int = 96,
        budget: int = 24,
        speculative: SpeculativeConfig | None = None,
        tiers: Tiers | None = None,
        weights: PolicyWeights | None = None,
        has_kv: bool = True,
        num_snapshots: int = NUM_SNAPSHOTS,
    ) -> None:
        info = runner.info
        self.weights = weights
        self.kv = make_kv(
            num_blocks,
            info.block_size,
            tiers=tiers,
            num_seqs=8,
            num_snapshots=num_snapshots * bool(info.state_bytes) if info.has_state else None,
            has_kv=has_kv,
        )
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(
            config,
            self.kv,
            max_model_len=info.max_model_len,
            has_state=info.has_state,
            keeps_states=info.keeps_states,
            speculative=speculative,
            num_tower_stages=info.num_tower_stages,
            has_sources=InputKind.SOURCE in info.input_kinds,
        )
        self.runner = runner
        self.tokens: dict[tuple[str, int], list[SampledToken]] = {}
        self.cached: dict[str, int] = {}
        self.in_flight: tuple[ScheduledBatch, StepInFlight] | None = None

    def add(self, name: str, prompt: tuple[int, ...], *, seed: int = 0, **params: Any) -> None:
        options = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "logprobs": 0, **params}
        request = GenerateRequest(
            request_id=name, model="m", prompt_ids=prompt, params=SamplingParams(**options)
        )
        self.scheduler.add(request, seed=seed, end_ids=frozenset(), weights=self.weights)

    def step(self) -> None:
        batch = self.scheduler.schedule()
        begun = None if batch is None else (batch, self.runner.submit(batch))
        ending = begun
        if self.runner.info.runs_ahead:
            ending, self.in_flight = self.in_flight, begun
        if ending is None:
            return
        for update in self.scheduler.update(ending[0], ending[1].wait()):
            assert update.error is None
            if update.prompt is not None:
                self.cached[update.request_id] = update.prompt.num_cached_tokens
            if update.token is not None:
                key = update.request_id, update.index
                self.tokens.setdefault(key, []).extend((*update.earlier, update.token))

    def has_work(self) -> bool:
        return self.scheduler.has_work() or self.in_flight is not None

    def finish(self) -> None:
        while self.has_work():
            self.step()
        self.scheduler.check_integrity()

    def result(self, name: str, index: int = 0) -> Generated:
        tokens = self.tokens[name, index]
        return Generated(
            [token.token_id for token in tokens],
            [token.logprob.logprob for token in tokens if token.logprob is not None],
            self.cached[name],
        )


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(1000 * seed + length)
    return tuple(source.randrange(120) for _ in range(length))


def assert_same(actual: Generated, wanted: Generated) -> None:
    assert actual.tokens == wanted.tokens
    assert actual.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", PATHS)
def test_ragged_prompts_joining_midway_in_chunks_equal_each_alone(name: str) -> None:
    prompts = {f"r{length}": random_prompt(length) for length in (1, 5, 13, 4 * WINDOW + 3)}
    session = Session(shared_runner(name), budget=12)
    for request_id, prompt in prompts.items():
        session.add(request_id, prompt)
        session.step()
    session.finish()
    for request_id, prompt in prompts.items():
        assert_same(session.result(request_id), alone(name, prompt))


def test_steps_with_prompts_have_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that row counts are the buckets that the backend asks for; padding rows hold NaN."""
    runner = shared_runner("llama", CompiledAttention)
    prompts = {f"r{length}": random_prompt(length, seed=length) for length in (3, 7, 29)}
    norm, rows = loaded_model("llama").model.model.norm, []
    original = type(norm)

    def call(self: Any, x: mx.array) -> mx.array:
        rows.append(x.shape[0])
        return original.__call__(self, x)

    monkeypatch.setattr(norm, "__class__", type("Counted", (original,), {"__call__": call}))
    session = Session(runner, budget=24)
    for request_id, prompt in prompts.items():
        session.add(request_id, prompt)
        session.step()
    session.finish()
    assert {16, 24} <= set(rows) <= {1, 2, 4, 8, 16, 24}
    for request_id, prompt in prompts.items():
        assert_same(session.result(request_id), alone("llama", prompt))


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, AheadAttention) for name in ("llama", "gemma3n", "gpt_oss", "lfm2", "qwen3_next")]
    + [
        (name, CompiledAttention)
        for name in (
            "llama",
            "gpt_oss",
            "opt-350m",
            "deepseek_v3",
            "lfm2",
            "qwen3_next",
        )
    ]
    # These have the same kinds of layers, and MLX compiles most kernels of some.
    + [
        pytest.param(name, CompiledAttention, marks=pytest.mark.slow)
        for name in (
            *("llama-4bit", "gemma2", "gemma3_text", "gemma3n", "opt", "opt-4bit"),
            *("qwen3_moe", "mamba2", "qwen3_5"),
        )
    ],
)
def test_steps_that_run_ahead_give_the_same(name: str, attention: type[AheadAttention]) -> None:
    check_steps_ahead(name, attention, Dispatcher)


@pytest.mark.parametrize("attention", [CompiledAttention, OrderedAttention])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_steps_that_a_thread_submits_give_the_same(
    name: str, attention: type[CompiledAttention]
) -> None:
    before = mx.default_stream(mx.default_device())
    try:
        check_steps_ahead(name, attention, ThreadDispatcher)
    finally:
        mx.set_default_stream(before)


def check_steps_ahead(
    name: str, attention: type[AheadAttention], dispatcher: type[Dispatcher]
) -> None:
    """Check the tokens of steps that run ahead, some of whose sequences are preempted."""
    runner = shared_runner(name, attention, dispatcher=dispatcher)
    assert runner.info.runs_ahead
    assert runner.info.is_compiled == issubclass(attention, CompiledAttention)
    prompts = {f"r{length}": random_prompt(length) for length in (1, 5, 13, 4 * WINDOW + 3)}
    session = Session(runner, budget=12)
    for request_id, prompt in prompts.items():
        session.add(request_id, prompt)
        session.step()
    session.finish()
    # With too few blocks for all, some are preempted while a step is in flight.
    crowd = {f"r{index}": random_prompt(14, seed=index) for index in range(4)}
    crowded = Session(runner, num_blocks=16, budget=64)
    for request_id, prompt in crowd.items():
        crowded.add(request_id, prompt)
    crowded.finish()
    assert crowded.scheduler.stats().num_preemptions > 0
    for texts, served in ((prompts, session), (crowd, crowded)):
        for request_id, prompt in texts.items():
            assert_same(served.result(request_id), alone(name, prompt))


def test_a_step_that_cannot_end_does_not_fail_all_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = shared_runner("llama", AheadAttention)
    first, second, third = (Session(runner) for _ in range(3))
    for session in (first, second, third):
        session.add("a", random_prompt(9))
    first.step()
    assert first.in_flight is not None

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(first.in_flight[1], "end", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        second.step()
    third.finish()
    assert third.result("a").tokens == alone("llama", random_prompt(9)).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_know_tokens_that_are_pending(temperature: float) -> None:
    results = []
    for backend in (ReferenceAttention, AheadAttention):
        session = Session(shared_runner("llama", backend))
        options = {"temperature": temperature, "seed": 3, "max_tokens": 24}
        session.add("plain", random_prompt(9), **options)
        session.add("count", random_prompt(9), frequency_penalty=2.0, **options)
        session.add("seen", random_prompt(9), presence_penalty=2.0, **options)
        session.add("again", random_prompt(9), repetition_penalty=9.0, **options)
        session.add("least", random_prompt(9), min_tokens=5, stop_token_ids=(13, 23), **options)
        session.finish()
        results.append([session.result(name) for name in session.cached])
    for actual, wanted in zip(*results, strict=True):
        assert_same(actual, wanted)
    plain, *changed = results[0]
    assert all(result.tokens != plain.tokens for result in changed), "a parameter changes nothing"


@pytest.mark.parametrize("name", PATHS)
def test_family_takes_its_path(name: str) -> None:
    assert shared_runner(name).info.path == PATHS[name]


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_next", "qwen3_5"])
def test_hybrids_decode_all_rows_in_one_forward(name: str) -> None:
    session = Session(shared_runner(name))
    for index in range(4):
        session.add(f"r{index}", random_prompt(1 + index))
    session.step()
    model = loaded_model(name).model
    original = type(model)
    calls: list[tuple[int, ...]] = []

    def counted(self: Any, tokens: mx.array, *args: Any, **options: Any) -> mx.array:
        calls.append(tokens.shape)
        return original.__call__(self, tokens, *args, **options)

    model.__class__ = type(original.__name__, (original,), {"__call__": counted})
    try:
        session.step()
    finally:
        model.__class__ = original
    assert calls == [(4, 1)]
    session.finish()


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "opt", "opt-350m", "deepseek_v3", "lfm2", "mamba2"]
)
def test_chunked_prefill_equals_whole(name: str) -> None:
    prompt = random_prompt(40)
    for budget in (8, 64):
        session = Session(shared_runner(name), budget=budget)
        session.add("r", prompt)
        session.finish()
        assert_same(session.result("r"), alone(name, prompt))


@pytest.mark.parametrize("name", STATELESS)
def test_prefix_hit_equals_miss(name: str) -> None:
    prompt = random_prompt(30)
    session = Session(shared_runner(name))
    for request_id in ("miss", "hit"):
        session.add(request_id, prompt)
        session.finish()
        assert_same(session.result(request_id), alone(name, prompt))
    assert session.result("miss").cached == 0
    assert session.result("hit").cached == 28


@pytest.mark.parametrize(
    "name", ["llama", "gemma3n", "gpt_oss", "opt", "opt-350m", "lfm2", "mamba2", "qwen3_next"]
)
def test_preempted_sequences_equal_undisturbed_ones(name: str) -> None:
    prompts = {f"r{index}": random_prompt(14, seed=index) for index in range(4)}
    # Four sequences of 20 tokens need 20 blocks.
    session = Session(shared_runner(name), num_blocks=16, budget=64)
    for request_id, prompt in prompts.items():
        session.add(request_id, prompt)
    session.finish()
    assert session.scheduler.stats().num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert_same(session.result(request_id), alone(name, prompt))


@pytest.mark.parametrize("name", ["llama", "gemma3n", "opt", "deepseek_v3", "lfm2", "qwen3_5"])
def test_samples_of_one_prompt_equal_requests_of_consecutive_seeds(name: str) -> None:
    prompt, seed = random_prompt(14), 11
    session = Session(shared_runner(name))
    session.add("group", prompt, seed=seed, n=4, temperature=1.0)
    session.finish()
    for index in range(4):
        single = Session(shared_runner(name))
        single.add("single", prompt, seed=seed + index, temperature=1.0)
        single.finish()
        assert_same(session.result("group", index), single.result("single"))


@pytest.mark.parametrize("name", ["llama", "opt-350m", "lfm2"])
def test_prompt_logprobs_are_the_models_own(name: str) -> None:
    prompt = random_prompt(20)
    logits = loaded_model(name).model(mx.array([prompt]))[0]
    wanted = nn.log_softmax(logits, axis=-1)
    session = Session(shared_runner(name), budget=8)
    session.add("r", prompt, prompt_logprobs=0, max_tokens=1)
    entries = []
    while session.scheduler.has_work():
        batch = session.scheduler.schedule()
        assert batch is not None
        output = session.runner.run(batch)
        session.scheduler.update(batch, output)
        for scored in output.prompt_logprobs.values():
            entries += scored
    assert [entry.token_id for entry in entries] == list(prompt[1:])
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(
            wanted[position, prompt[position + 1]].item(), abs=1e-4
        )
