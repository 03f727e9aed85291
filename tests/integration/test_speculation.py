"""With proposals, every sequence gets the tokens it gets without them."""

from __future__ import annotations

import importlib
import shutil
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.generation.assembly import speculative_for
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.llm import RequestOutput
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import ScheduledBatch, StepInFlight
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_draft, make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import LoadedModel
from tests.fakes import make_info
from tests.integration.test_parity_generate import (
    AheadAttention,
    CompiledAttention,
    Generated,
    Session,
    assert_same,
    loaded_model,
    random_prompt,
    shared_runner,
)

pytestmark = pytest.mark.slow

NGRAM = SpeculativeConfig(prompt_lookup_min=1, disable_by_batch_size=8)
TEXTS = (
    "Repeat this text: the quick brown fox jumps over the lazy dog",
    "What is 17 + 25?",
    "Sort these numbers: 9 4 7 1",
)


def generate(
    name: str,
    speculative: SpeculativeConfig | None,
    backend: Any = ReferenceAttention,
    runner: ModelRunner | None = None,
) -> tuple[dict[str, Generated], Session]:
    """Run requests of different kinds that join midway, in a pool too small for all."""
    runner = runner or shared_runner(name, backend)
    session = Session(runner, num_blocks=40, speculative=speculative)
    # The prompts repeat themselves, so something is proposed at once.
    prompts = {f"r{size}": random_prompt(size) * 3 for size in (1, 4, 9)}
    options: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"temperature": 1.0, "top_k": 3, "seed": 3},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"min_tokens": 9, "stop_token_ids": tuple(range(60))},
        {"temperature": 1.0, "n": 2, "logit_bias": ((7, 6.0), (8, 6.0))},
    ]
    results: dict[str, Generated] = {}
    names = []
    for number, params in enumerate(options):
        for request_id, prompt in prompts.items():
            names.append(f"{request_id}-{number}")
            session.add(names[-1], prompt, **{"max_tokens": 20, **params})
        session.step()
    session.finish()
    for name in names:
        for index in range(2 if name.endswith("-5") else 1):
            results[f"{name}/{index}"] = session.result(name, index)
    return results, session


@cache
def without_proposals(name: str, backend: type[ReferenceAttention]) -> dict[str, Generated]:
    """Return what the requests get alone; computed once for all tests."""
    return generate(name, None, backend)[0]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("backend", [ReferenceAttention, AheadAttention, CompiledAttention])
def test_every_kind_of_request_gets_the_same_tokens(name: str, backend: Any) -> None:
    wanted = without_proposals(name, backend)
    actual, session = generate(name, NGRAM, backend)
    for request, result in wanted.items():
        assert actual[request].tokens == result.tokens, request
        assert_same(actual[request], Generated(result.tokens, result.logprobs))
    stats = session.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.speculation.num_accepted_tokens > 8
    assert stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens


#: STATEFUL models, and True for those whose rows keep the state before each proposal.
STATEFUL = {
    "qwen3_5": True,
    "lfm2": True,
    "mamba2": True,
    "kimi_linear": True,
    "jamba": False,
    "rwkv7": False,
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("backend", [ReferenceAttention, AheadAttention, CompiledAttention])
def test_states_follow_accepted_proposals(name: str, backend: Any) -> None:
    runner = shared_runner(name, backend, speculates=True)
    assert runner.info.keeps_states == STATEFUL[name]
    actual, session = generate(name, NGRAM, runner=runner)
    for request, result in without_proposals(name, ReferenceAttention).items():
        assert_same(actual[request], Generated(result.tokens, result.logprobs))
    stats = session.scheduler.stats()
    assert stats.num_preemptions > 0
    assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens


def with_draft(
    name: str, backend: type[ReferenceAttention], *, noise: float, vocab: int
) -> ModelRunner:
    """Return a model of the tests, with a noisy copy of itself as draft model."""
    loaded = loaded_model(name)
    config = loaded.config | {"vocab_size": vocab}
    module = importlib.import_module("mlx_lm.models.llama")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(3)
    weights = dict(cast("list[tuple[str, mx.array]]", tree_flatten(loaded.model.parameters())))
    for path, own in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())):
        weight = weights[path]
        if own.shape != weight.shape:
            missing = own.shape[0] - weight.shape[0]
            weight = mx.pad(weight, [(0, max(missing, 0)), (0, 0)])[: own.shape[0]]
        weights[path] = weight + noise * mx.random.normal(weight.shape)
    model.load_weights(list(weights.items()))
    layouts = probe_layout(model)
    small = LoadedModel(model, config, Path("draft"), "float32", 0)
    draft = at_once(make_draft)(small, layouts, backend(4), num_blocks=96, block_size=4)[0]
    scheduler = SchedulerConfig(max_num_seqs=8)
    layouts = probe_layout(loaded.model)
    attention = backend(4)
    cache = CacheConfig(block_size=4)
    plan = plan_kv(layouts, loaded.config, cache, scheduler, 96, attention)
    return at_once(make_runner)(loaded, layouts, plan, 96, attention, draft)[0]


@pytest.mark.parametrize("backend", [ReferenceAttention, AheadAttention, CompiledAttention])
@pytest.mark.parametrize(("noise", "larger"), [(0.0, 0), (0.01, 9), (0.01, -9)])
def test_a_draft_model_changes_no_token(backend: Any, noise: float, larger: int) -> None:
    wanted = without_proposals("llama", backend)
    vocab = loaded_model("llama").config["vocab_size"] + larger
    runner = with_draft("llama", backend, noise=noise, vocab=vocab)
    config = SpeculativeConfig(method="draft_model", model="draft", disable_by_batch_size=8)
    actual, session = generate("llama", config, runner=runner)
    for request, result in wanted.items():
        assert_same(actual[request], Generated(result.tokens, result.logprobs))
    stats = session.scheduler.stats().speculation
    share = stats.num_accepted_tokens / stats.num_draft_tokens
    assert stats.num_drafts > 20
    # The end of a text may cut a draft of the model itself.
    assert share > 0.9 if not noise else 0.1 < share < 1


def test_a_draft_model_with_a_state_is_refused() -> None:
    loaded = loaded_model("lfm2")
    with pytest.raises(ConfigError, match="keeps a state"):
        at_once(make_draft)(
            loaded,
            probe_layout(loaded.model),
            ReferenceAttention(4),
            num_blocks=64,
            block_size=4,
        )


def test_a_draft_model_needs_the_same_tokens(tmp_path: Path) -> None:
    shutil.copytree(DEMO_FOLDER, tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<|im_end|>"', '"<|another|>"'))
    config = tmp_path / "other" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"<|im_end|>"', '"<|another|>"'))
    with pytest.raises(ConfigError, match=r"--speculative-config: .* the same vocabulary"):
        LLM(speculative_config={"method": "draft_model", "model": str(tmp_path / "other")})


def engine_of(llm: LLM) -> GenerationEngine:
    own: Any = llm._engine.client.ask(lambda state: next(iter(state.engines.values()))).result()
    return own


def test_a_draft_model_shares_the_memory(plain: LLM) -> None:
    both = LLM(
        cache=CacheConfig(kv_cache_bytes=1 << 26),
        speculative_config={"method": "draft_model", "model": str(DEMO_FOLDER)},
    )
    assert engine_of(both).info.kv_bytes <= 1 << 26
    assert engine_of(both).info.num_blocks == engine_of(plain).info.num_blocks // 2
    assert engine_of(both).info.weight_bytes == 2 * engine_of(plain).info.weight_bytes
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=40)
    wanted, actual = plain.chat(chats, params), both.chat(chats, params)
    assert [shown(output) for output in actual] == [shown(output) for output in wanted]
    stats = engine_of(both).stats.speculation
    # A draft model equal to the model is always right; only the end of a text cuts a draft.
    assert stats.accepted_per_position[0] >= stats.num_drafts - len(TEXTS)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(cache=CacheConfig(kv_cache_bytes=1 << 26))


@pytest.fixture(scope="module")
def speculating() -> LLM:
    return LLM(
        cache=CacheConfig(kv_cache_bytes=1 << 26),
        speculative_config={"method": "ngram", "disable_by_batch_size": 16},
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0, "stop": ["fox j"], "logprobs": 1},
        {"temperature": 0, "stop": ["umps"], "include_stop_str_in_output": True},
        {"temperature": 0, "max_tokens": 7},
        {"temperature": 1.0, "seed": 5, "n": 2},
    ],
)
def test_texts_of_the_embedded_model_stay_the_same(
    plain: LLM, speculating: LLM, options: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 60, **options})
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    wanted, actual = plain.chat(chats, params), speculating.chat(chats, params)
    for before, after in zip(wanted, actual, strict=True):
        assert shown(after) == shown(before)


def shown(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [
        (
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.stop_reason,
            len(completion.logprobs),
        )
        for completion in output.outputs
    ]


def test_copying_saves_steps(speculating: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    engine = engine_of(speculating)
    before = engine.stats.speculation
    submit = engine._runner.submit

    def counted(batch: ScheduledBatch) -> StepInFlight:
        batches.append(batch.num_tokens)
        return submit(batch)

    monkeypatch.setattr(engine._runner, "submit", counted)
    chat = [[{"role": "user", "content": TEXTS[0]}]]
    [output] = speculating.chat(chat, SamplingParams(temperature=0, max_tokens=100))
    after = engine.stats.speculation
    tokens = len(output.outputs[0].token_ids)
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert len(batches) == tokens - accepted
    assert accepted >= tokens // 3


def test_what_is_left_open_the_device_decides() -> None:
    assert speculative_for(None, make_info(), "m") is None
    few = SpeculativeConfig(disable_by_batch_size=3)
    assert speculative_for(few, make_info(), "m") == few
    stateful = make_info(has_state=True, state_bytes=1)
    small = speculative_for(SpeculativeConfig(), stateful, "m")
    assert small == SpeculativeConfig(disable_by_batch_size=4)
    chosen = speculative_for(SpeculativeConfig(), make_info(), "m")
    assert chosen is not None
    assert chosen.disable_by_batch_size is not None


def test_a_state_that_cannot_be_copied_refuses_the_setting() -> None:
    with pytest.raises(ConfigError, match="my-model keeps a state"):
        speculative_for(NGRAM, make_info(has_state=True, path="alone"), "my-model")
    copied = make_info(has_state=True, state_bytes=1, path="split")
    assert speculative_for(NGRAM, copied, "my-model") == NGRAM
