"""Constrained samples are valid on every backend, in any mix, and change no other sample."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.step import ScheduledBatch, ScheduledSequence
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.integration.test_parity_generate import (
    BLOCK_SIZE,
    Session,
    assert_same,
    loaded_model,
    random_prompt,
)
from tests.small_vocabulary import END, small_compiler, text_of

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 3},
        "b": {"type": "array", "items": {"enum": [1, None, "x"]}, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,9}-[0-9]{1,3}"
BACKENDS = [ReferenceAttention, AheadAttention, CompiledAttention]
RANDOM = {"temperature": 1.0, "max_tokens": 250, "stop_token_ids": (END,)}


def runner_of(name: str, backend: type[ReferenceAttention]) -> ModelRunner:
    """Return a runner without sequences, because each scheduler counts them from 0."""
    runner = shared(name, backend)
    masks: Any = runner._grammars._masks
    masks.forget(list(masks._samples))
    return runner


@cache
def shared(name: str, backend: type[ReferenceAttention]) -> ModelRunner:
    loaded = loaded_model(name)
    layouts = probe_layout(loaded.model)
    scheduler, attention = SchedulerConfig(max_num_seqs=8), backend(BLOCK_SIZE)
    plan = plan_kv(
        layouts, loaded.config, CacheConfig(block_size=BLOCK_SIZE), scheduler, 320, attention
    )
    return at_once(make_runner)(loaded, layouts, plan, 512, attention, grammars=small_compiler())[0]


def grammar(spec: GrammarSpec, **more: Any) -> Grammar:
    return Grammar(text=small_compiler().compile(spec), **more)


def text(session: Session, name: str, index: int = 0) -> str:
    """Return a sample's text; fail unless it ended by itself."""
    tokens = session.result(name, index).tokens
    assert tokens[-1] == END, text_of(tokens)
    return text_of(tokens[:-1])


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["a", "b"]
    assert len(value["a"]) <= 3
    assert len(value["b"]) <= 2
    assert all(item in (1, None, "x") for item in value["b"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_mixed_batch_is_valid_and_leaves_free_rows_alone(name: str, backend: Any) -> None:
    runner = runner_of(name, backend)
    free = {"temperature": 1.0, "max_tokens": 40}
    alone = Session(runner, num_blocks=512)
    alone.add("free", random_prompt(9), seed=5, **free)
    alone.finish()
    runner = runner_of(name, backend)
    session = Session(runner, num_blocks=512)
    session.add(
        "json", random_prompt(5), seed=1, grammar=grammar(specs.json_schema(SCHEMA)), **RANDOM
    )
    session.step()
    session.add("free", random_prompt(9), seed=5, **free)
    session.add("regex", random_prompt(7), seed=2, grammar=grammar(specs.regex(REGEX)), **RANDOM)
    session.finish()
    check_json(text(session, "json"))
    assert re.fullmatch(REGEX, text(session, "regex"))
    assert_same(session.result("free"), alone.result("free"))
    masks: Any = runner._grammars._masks
    # The runner learns of ended sequences with the next batch.
    session.add("late", random_prompt(3))
    session.finish()
    assert len(masks) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_of_a_prompt_are_all_valid_and_different(backend: Any) -> None:
    session = Session(runner_of("llama", backend), num_blocks=512)
    of = grammar(specs.json_schema(SCHEMA))
    session.add("r", random_prompt(9), grammar=of, n=6, frequency_penalty=0.3, **RANDOM)
    session.finish()
    texts = [text(session, "r", index) for index in range(6)]
    for answer in texts:
        check_json(answer)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_preempted_samples_go_on_where_they_were(backend: Any) -> None:
    of = grammar(specs.regex("[a-z]{40,60}"))
    options = {**RANDOM, "max_tokens": 80}
    results = []
    for num_blocks in (512, 40):
        runner = runner_of("llama", backend)
        session = Session(runner, num_blocks=num_blocks, budget=64)
        for index in range(4):
            session.add(
                f"r{index}", random_prompt(14, seed=index), grammar=of, seed=index, **options
            )
        session.finish()
        results.append([text(session, f"r{index}") for index in range(4)])
        assert (session.scheduler.stats().num_preemptions > 0) == (num_blocks == 40)
    assert results[0] == results[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_matchers_can_be_made_again_at_any_time(backend: Any) -> None:
    of = grammar(specs.json_schema(SCHEMA))
    results = []
    for drops in (False, True):
        runner = runner_of("llama", backend)
        session = Session(runner, num_blocks=512)
        session.add("r", random_prompt(9), grammar=of, seed=3, **RANDOM)
        while session.scheduler.has_work() or session.in_flight is not None:
            if drops:
                masks: Any = runner._grammars._masks
                masks.forget(list(masks._samples))
            session.step()
        results.append(text(session, "r"))
    check_json(results[0])
    assert results[0] == results[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_min_tokens_do_not_keep_a_complete_answer_from_ending(backend: Any) -> None:
    session = Session(runner_of("llama", backend), num_blocks=512)
    of = grammar(specs.choice(["yes", "no"]))
    session.add("r", random_prompt(9), grammar=of, min_tokens=20, **RANDOM)
    session.finish()
    assert text(session, "r") in ("yes", "no")


@pytest.mark.parametrize("backend", BACKENDS)
def test_reasoning_is_free_and_the_answer_is_not(backend: Any) -> None:
    session = Session(runner_of("llama", backend), num_blocks=512)
    of = grammar(specs.choice(["yes", "no"]), begins_after="</think>")
    # The bias makes a model with random weights close its reasoning.
    session.add("r", random_prompt(9), grammar=of, logit_bias=((3, 1.0),), seed=1, **RANDOM)
    session.finish()
    answer = text(session, "r")
    before, _, after = answer.partition("</think>")
    assert before
    assert after in ("yes", "no")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_is_no_grammar_fails_its_own_request_only(backend: Any) -> None:
    runner = runner_of("llama", backend)
    session = Session(runner, num_blocks=512)
    session.add("bad", random_prompt(9), grammar=Grammar(text="{}"), **RANDOM)
    session.add("good", random_prompt(7), grammar=grammar(specs.regex(REGEX)), **RANDOM)
    errors: list[str] = []
    ended: list[tuple[ScheduledBatch, Any]] = []
    while session.scheduler.has_work() or ended:
        batch = session.scheduler.schedule()
        if batch is not None:
            ended.append((batch, runner.submit(batch)))
        if len(ended) > runner.info.runs_ahead or batch is None:
            first, step = ended.pop(0)
            for update in session.scheduler.update(first, step.wait()):
                if update.error is not None:
                    errors.append(f"{update.request_id}: {update.error}")
                if update.token is not None:
                    session.tokens.setdefault(("good", 0), []).append(update.token)
    assert len(errors) == 1
    assert errors[0].startswith("bad: ")
    token_ids = [token.token_id for token in session.tokens["good", 0]]
    assert re.fullmatch(REGEX, text_of(token_ids[:-1]))


def test_constrained_samples_do_not_speculate_and_others_do() -> None:
    session = Session(
        runner_of("llama", ReferenceAttention),
        num_blocks=512,
        speculative=SpeculativeConfig(prompt_lookup_min=1, disable_by_batch_size=8),
    )
    of = grammar(specs.regex("(ab){20}"))
    session.add("r", random_prompt(9) * 3, grammar=of, **RANDOM)
    session.finish()
    assert session.scheduler.stats().speculation.num_draft_tokens == 0
    session.add("again", random_prompt(9) * 3, grammar=of, **RANDOM)
    session.add("free", random_prompt(9) * 3, max_tokens=40)
    session.finish()
    assert session.scheduler.stats().speculation.num_draft_tokens > 0
    assert text(session, "r") == text(session, "again") == "ab" * 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_are_the_models_own(backend: Any) -> None:
    session = Session(runner_of("llama", backend), num_blocks=512)
    of = grammar(specs.choice(["yes"]))
    session.add("r", random_prompt(9), grammar=of, **RANDOM)
    session.finish()
    # The grammar left no choice, although the model preferred other tokens.
    assert all(logprob < -0.1 for logprob in session.result("r").logprobs)


def test_offline_use_has_a_helper() -> None:
    llm = LLM()
    params = SamplingParams(max_tokens=40, n=2, grammar=llm.grammar(specs.regex(REGEX)), seed=1)
    for sample in llm.generate("Call me at ", params)[0].outputs:
        assert sample.finish_reason == "stop"
        assert re.fullmatch(REGEX, sample.text)
    with pytest.raises(InvalidRequestError):
        llm.grammar(specs.regex("("))
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        llm.generate("a", replace(params, allowed_token_ids=(5,)))


def test_a_step_that_fails_leaves_no_matcher_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("llama", ReferenceAttention)
    masks: Any = runner._grammars._masks
    masks._samples[99] = None

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner._path, "logits", fail)
    row = ScheduledSequence(seq_id=0, slot=0, start=0, token_ids=(1,), block_table=(0,))
    with pytest.raises(RuntimeError):
        runner.submit(ScheduledBatch(step_id=0, sequences=(row,), ended=(99,)))
    assert 99 not in masks._samples
