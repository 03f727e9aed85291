"""Models with KV in 8 or 4 bits, from the setting to the answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from prometheus_client import generate_latest

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.llm import LLM
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.worker.attention.quantisation import dequantise, quantisation_of, quantise
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.generation.cache_layout import OpaqueLayout, probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from tests.integration.test_parity_generate import (
    BLOCK_SIZE,
    PATHS,
    Session,
    assert_same,
    build_model,
    loaded_model,
    random_prompt,
    shared_runner,
)

FAMILIES = (
    "llama",
    "gemma2",
    "gemma3_text",
    "gemma3n",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "lfm2",
)
POOL_BYTES = 1 << 22


class RoundedKVCache(KVCache):
    """mlx_lm's cache, with keys and values quantised and dequantised as they come in."""

    def __init__(self, kv_cache_dtype: str) -> None:
        super().__init__()
        self._scheme = quantisation_of(kv_cache_dtype)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert self._scheme is not None
        rounded: Any = [
            dequantise(*quantise(array, self._scheme), self._scheme, array.shape[-1], array.dtype)
            for array in (keys, values)
        ]
        updated: Any = super().update_and_fetch(*rounded)
        return updated


@cache
def quantised_runner(name: str, kv_cache_dtype: str) -> ModelRunner:
    scheme = quantisation_of(kv_cache_dtype)
    assert scheme is not None
    return runner_of(loaded_model(name), QuantisedReferenceAttention(BLOCK_SIZE, scheme))


def runner_of(loaded: Any, attention: QuantisedReferenceAttention) -> ModelRunner:
    layouts = probe_layout(loaded.model)
    cache_config = CacheConfig(block_size=BLOCK_SIZE)
    scheduler = SchedulerConfig(max_num_seqs=8)
    plan = plan_kv(layouts, loaded.config, cache_config, scheduler, 96, attention)
    return at_once(make_runner)(loaded, layouts, plan, 96, attention)[0]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_take_the_same_path_and_say_how_kv_is_kept(name: str, kv_cache_dtype: str) -> None:
    info = quantised_runner(name, kv_cache_dtype).info
    assert (info.path, info.kv_cache_dtype) == (PATHS[name], kv_cache_dtype)
    assert 0 < info.kv_bytes < shared_runner(name).info.kv_bytes / 2


@pytest.mark.parametrize(("kv_cache_dtype", "most"), [("int8", 5e-3), ("int4", 6e-2)])
def test_a_batch_says_what_a_stock_model_does_with_keys_and_values_rounded_alike(
    kv_cache_dtype: str, most: float
) -> None:
    model = loaded_model("llama").model
    prompts = {f"r{length}": random_prompt(length) for length in (5, 19, 40)}
    session = Session(quantised_runner("llama", kv_cache_dtype), budget=12)
    for request_id, prompt in prompts.items():
        session.add(request_id, prompt)
        session.step()
    session.finish()
    for request_id, prompt in prompts.items():
        actual = session.result(request_id)
        tokens = [*prompt, *actual.tokens[:-1]]
        caches = [RoundedKVCache(kv_cache_dtype) for _ in model.layers]
        # Tokens are scored one by one, so that both runs have written what they read.
        logits = [model(mx.array([[token]]), cache=caches)[0, -1] for token in tokens]
        wanted, exact = (
            [
                (row - mx.logsumexp(row))[token].item()
                for row, token in zip(rows[len(prompt) - 1 :], actual.tokens, strict=True)
            ]
            for rows in (logits, list(model(mx.array([tokens]))[0]))
        )
        assert actual.logprobs == pytest.approx(wanted, abs=most)
        assert actual.logprobs != pytest.approx(exact, abs=most), "nothing was quantised"


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_samples_and_later_requests_read_the_blocks_of_a_prompt(name: str) -> None:
    prompt = random_prompt(14)
    session = Session(quantised_runner(name, "int8"))
    session.add("samples", prompt, n=3)
    session.finish()
    session.add("hit", prompt, max_tokens=1)
    session.finish()
    first, *others = (session.result("samples", index) for index in range(3))
    for other in others:
        assert_same(other, first)
    hit = session.result("hit")
    assert hit.cached == 12
    # The rest of the prompt runs in other shapes, so some values round to the next level.
    assert hit.logprobs == pytest.approx(first.logprobs[:1], abs=2e-2)


def test_a_model_with_caches_of_its_own_is_refused() -> None:
    scheme = quantisation_of("int8")
    assert scheme is not None
    loaded = loaded_model("llama")
    layouts = probe_layout(loaded.model)
    attention = QuantisedReferenceAttention(BLOCK_SIZE, scheme)
    plan = plan_kv(layouts, loaded.config, CacheConfig(), SchedulerConfig(), 96, attention)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be auto: .*its own caches"):
        at_once(make_runner)(
            loaded, (OpaqueLayout("SomeCache"),) * len(layouts), plan, 96, attention
        )[0]


def test_values_beyond_the_scales_are_refused_at_load() -> None:
    model, config = build_model("llama")
    for layer in model.layers:
        layer.self_attn.v_proj.weight = layer.self_attn.v_proj.weight * 1e8
    scheme = quantisation_of("int8")
    assert scheme is not None
    loaded = replace(loaded_model("llama"), model=model, config=config)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be auto .*too large"):
        runner_of(loaded, QuantisedReferenceAttention(BLOCK_SIZE, scheme))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_the_setting_reaches_the_pool(kv_cache_dtype: str) -> None:
    llm = LLM(cache=CacheConfig(kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=POOL_BYTES))
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=64))
    assert output.outputs[0].text.endswith("17 + 25 = 42")
    info = llm._model.info
    assert info.kv_cache_dtype == kv_cache_dtype
    # KV is 2 heads of 64 in 6 layers, with a step and a least value for each.
    token_bytes = {"int8": 64 + 4, "int4": 32 + 4}[kv_cache_dtype] * 2 * 2 * 6
    assert info.num_blocks == POOL_BYTES // (token_bytes * info.block_size)
    assert info.kv_bytes == info.num_blocks * token_bytes * info.block_size
    families = MetricFamilies()
    EngineMetrics(families, "m", info)
    assert f'cache_dtype="{kv_cache_dtype}"'.encode() in generate_latest(families.registry)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'fp8' is not one of"):
        LLM(cache=CacheConfig(kv_cache_dtype="fp8"))
