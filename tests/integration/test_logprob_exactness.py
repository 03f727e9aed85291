"""Log-probabilities of sampled tokens equal those of the same tokens scored as a prompt."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlx_parallm import LLM
from mlx_parallm.config import CacheConfig, SpeculativeConfig
from mlx_parallm.types.request import (
    PROCESSED_LOGPROBS,
    RAW_LOGPROBS,
    SamplingParams,
    ThinkingBudget,
)
from mlx_parallm.types.step import TokenLogprob
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.integration.test_parity_generate import Session, random_prompt, shared_runner

TOLERANCE = 1e-4
# The prompt is longer than a step's budget, so it is computed in chunks.
PROMPT = random_prompt(21)
N = 3
REQUESTS: dict[str, dict[str, Any]] = {
    "group": {"n": N, "seed": 4, "temperature": 1.0},
    "again": {"seed": 9, "temperature": 1.0},
    "processed": {"seed": 2, "temperature": 1.0, "logprobs_mode": PROCESSED_LOGPROBS},
    "greedy": {"logprobs_mode": PROCESSED_LOGPROBS},
    # Settings of the draw do not change the model's own log-probabilities.
    "changed": {
        "seed": 5,
        "temperature": 0.7,
        "top_k": 9,
        "presence_penalty": 1.0,
        "logit_bias": ((3, 4.0),),
    },
    "forced": {"seed": 6, "temperature": 1.0, "allowed_token_ids": (17,)},
}


def scores(
    name: str, backend: type[ReferenceAttention], texts: list[tuple[int, ...]]
) -> list[tuple[TokenLogprob | None, ...]]:
    """Return the prompt log-probabilities of each text, all in one batch, in other chunks."""
    session = Session(shared_runner(name, backend), budget=17)
    results: dict[str, tuple[TokenLogprob | None, ...]] = {}
    for number, text in enumerate(texts):
        session.add(str(number), text, prompt_logprobs=0, max_tokens=0)
    while session.scheduler.has_work():
        batch = session.scheduler.schedule()
        assert batch is not None
        for update in session.scheduler.update(batch, session.runner.run(batch)):
            if update.prompt is not None:
                assert update.prompt.prompt_logprobs is not None
                results[update.request_id] = update.prompt.prompt_logprobs
    return [results[str(number)] for number in range(len(texts))]


def assert_exact(name: str, backend: type[ReferenceAttention], session: Session) -> None:
    """Check that every sample's log-probabilities are those of its tokens after the prompt."""
    samples = [session.result(request, index) for request, index in session.tokens]
    texts = [(*PROMPT, *sample.tokens) for sample in samples]
    for sample, scored in zip(samples, scores(name, backend, texts), strict=True):
        entries = scored[len(PROMPT) :]
        assert [entry.token_id for entry in entries if entry] == sample.tokens
        assert len(sample.logprobs) == len(sample.tokens)
        values = [entry.logprob for entry in entries if entry]
        assert sample.logprobs == pytest.approx(values, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", ReferenceAttention),
        ("llama", AheadAttention),
        ("llama", CompiledAttention),
        ("gemma3_text", ReferenceAttention),
        ("deepseek_v3", ReferenceAttention),
        ("lfm2", ReferenceAttention),
        ("qwen3_5", ReferenceAttention),
    ],
)
def test_sampled_tokens_have_the_numbers_of_the_same_tokens_as_a_prompt(
    name: str, backend: type[ReferenceAttention]
) -> None:
    session = Session(shared_runner(name, backend), budget=8)
    for request, params in REQUESTS.items():
        session.add(request, PROMPT, **params)
        session.step()
    session.finish()
    assert len(session.tokens) == N + len(REQUESTS) - 1
    if not session.runner.info.has_state:
        assert session.cached["forced"] > 0, "no prefix was shared"
    assert session.result("forced").tokens == [17] * len(session.result("forced").tokens)
    assert_exact(name, backend, session)


def test_tokens_that_were_proposed_have_the_same_numbers() -> None:
    speculative = SpeculativeConfig(prompt_lookup_min=1, disable_by_batch_size=64)
    session = Session(shared_runner("llama"), budget=24, speculative=speculative)
    forced = {"temperature": 1.0, "allowed_token_ids": (17,), "max_tokens": 24}
    session.add("raw", PROMPT, **forced)
    session.add("processed", PROMPT, logprobs_mode=PROCESSED_LOGPROBS, **forced)
    session.add("likely", PROMPT, seed=3, temperature=1.0, top_k=2, max_tokens=24)
    session.finish()
    counts = session.scheduler.stats().speculation
    assert counts is not None
    assert counts.num_accepted_tokens > 0
    assert session.result("processed").logprobs == [0.0] * 24
    del session.tokens["processed", 0]
    assert_exact("llama", ReferenceAttention, session)


def test_the_engines_mode_is_that_of_requests_that_name_none() -> None:
    llm = LLM(logprobs_mode=PROCESSED_LOGPROBS, cache=CacheConfig(kv_cache_bytes=1 << 24))
    end_id = llm.tokenizer.token_id("</think>")
    assert end_id is not None
    budget = ThinkingBudget(tokens=0, end_id=end_id, is_open=True)
    options: dict[str, Any] = {"max_tokens": 1, "seed": 1, "entropy": True, "logprobs": -1}
    params = [
        SamplingParams(allowed_token_ids=(9,), **options),
        SamplingParams(thinking_budget=budget, **options),
        SamplingParams(allowed_token_ids=(9,), logprobs_mode=RAW_LOGPROBS, **options),
    ]
    entries = [output.outputs[0].logprobs[0] for output in llm.generate(["Once"] * 3, params)]
    for entry, token in zip(entries, (9, end_id), strict=False):
        assert entry.top == ((token, 0.0),)
        assert (entry.token_id, entry.logprob, entry.entropy) == (token, 0.0, 0.0)
    entry = entries[2]
    assert entry.logprob < 0
    assert len(entry.top) > 1000
    total = sum(math.exp(value) for _, value in entry.top)
    assert total == pytest.approx(1, abs=1e-4)
    spread = -sum(math.exp(value) * value for _, value in entry.top)
    assert entry.entropy == pytest.approx(spread, abs=1e-4)
    whole = SamplingParams(max_tokens=0, prompt_logprobs=-1)
    entries = llm.generate("Once upon", whole)[0].prompt_logprobs
    assert entries is not None
    first, *others = entries
    assert first is None
    assert others
    for scored in others:
        assert scored is not None
        assert len(scored.top) == len(entry.top)
        assert scored.rank == 1 + sum(value > scored.logprob for _, value in scored.top)


def test_logits_that_are_not_numbers_fail_the_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = shared_runner("llama")
    path = runner._path  # pyright: ignore[reportPrivateUsage]
    original = path.logits

    def spoiled(rows: Any, token_ids: Any, wanted: Any) -> Any:
        logits = original(rows, token_ids, wanted)
        logits[0, 3] = float("nan")
        return logits

    monkeypatch.setattr(path, "logits", spoiled)
    session = Session(runner, budget=64)
    for request in ("first", "second"):
        session.add(request, PROMPT, temperature=1.0)
    batch = session.scheduler.schedule()
    assert batch is not None
    output = runner.run(batch)
    first, second = (row.seq_id for row in batch.sequences)
    assert set(output.failed) == {first}
    assert "not numbers" in output.failed[first]
    assert [token.seq_id for token in output.tokens] == [second]
