"""Encoder-decoders under the scheduler: tokens are those of each request alone, in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.generation.inputs.prompt_inputs import PromptInputs
from mlx_parallm.generation.scheduler.sources import SourceCache, SourceProduct
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.model_input import source_of
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import SourceTable
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.model_runner import ModelRunner
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.integration.test_parity_generate import Session
from tests.source_batches import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    OneModel,
    new_runner,
    random_text,
    tiny_t5,
)

NEW_TOKENS = 8
#: LENGTHS of sources and decoder prompts; two requests have the first source.
LENGTHS = (
    (600, 1),
    (600, 2),
    (1, 1),
    (3, 40),
    (4, 1),
    (5, 7),
    (17, 1),
    (33, 13),
    (64, 3),
    (150, 1),
)
#: TOLERANCE: of log-probabilities.
TOLERANCE = 1e-3
RUNS: Mapping[str, Callable[[int], ReferenceAttention]] = {
    "reference": ReferenceAttention,
    "int8": lambda size: QuantisedReferenceAttention(size, KVQuantisation(bits=8)),
    "runs ahead": AheadAttention,
    "compiled": CompiledAttention,
}
#: SMALL: blocks of the longest source and its answer, and some more.
SMALL = -(-600 // BLOCK_SIZE) + -(-(40 + NEW_TOKENS) // BLOCK_SIZE) + 3


@cache
def runner_of(name: str) -> ModelRunner:
    return new_runner(tiny_t5(), RUNS[name](BLOCK_SIZE), num_blocks=NUM_BLOCKS)


@cache
def texts() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return sources and decoder prompts; all prompts begin alike."""
    rng = random.Random(0)
    beginning = random_text(rng, 40)
    first = random_text(rng, 600)
    return [
        (first if number < 2 else random_text(rng, length), beginning[:size])
        for number, (length, size) in enumerate(LENGTHS)
    ]


class SourceSession(Session):
    """A scheduler over a runner of a tiny T5."""

    def __init__(self, name: str, *, num_blocks: int = NUM_BLOCKS, budget: int = 48) -> None:
        runner = runner_of(name)
        plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=False)
        worker: Any = OneModel(runner)
        super().__init__(DeviceRunner(worker, "m", plan), num_blocks=num_blocks, budget=budget)

    def ask(self, request_id: str, number: int, **params: Any) -> None:
        source, prompt = texts()[number]
        options = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "logprobs": 0, **params}
        request = GenerateRequest(
            request_id=request_id,
            model="m",
            prompt_ids=prompt,
            params=SamplingParams(**options),
            inputs=(source_of(source),),
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset(), weights=self.weights)


@cache
def alone(name: str, number: int) -> tuple[list[int], list[float]]:
    """Return the tokens of a request with nothing beside it, and their log-probabilities."""
    session = SourceSession(name, budget=1024)
    session.ask("alone", number)
    session.finish()
    result = session.result("alone")
    return result.tokens, result.logprobs


def differs(session: SourceSession, numbers: Mapping[str, int], name: str) -> list[str]:
    """Return the requests whose answers are not those that they get alone."""
    wrong: list[str] = []
    for request_id, number in numbers.items():
        tokens, logprobs = alone(name, number)
        result = session.result(request_id)
        is_near = result.tokens == tokens and np.allclose(
            result.logprobs, logprobs, rtol=0, atol=TOLERANCE
        )
        wrong += [] if is_near else [request_id]
    return wrong


def run_all(
    session: SourceSession, order: list[tuple[int, int]], aborted: set[int]
) -> dict[str, int]:
    """Run requests that join after some steps each; the number of each that was not aborted."""
    numbers: dict[str, int] = {}
    for place, (number, steps) in enumerate(order):
        numbers[f"r{place}"] = number
        session.ask(f"r{place}", number)
        for _ in range(steps):
            session.step()
        late = f"r{place - 1}"
        if place in aborted and session.scheduler.has_request(late):
            session.scheduler.abort(late)
            del numbers[late]
        session.scheduler.check_integrity()
    session.finish()
    return numbers


def assert_nothing_is_lost(session: SourceSession) -> None:
    session.scheduler.reset_prefix_cache(reset_running=False)
    session.scheduler.check_integrity()
    assert session.kv.num_free == session.kv.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=12, deadline=None)
@given(
    order=st.lists(
        st.tuples(st.integers(0, len(LENGTHS) - 1), st.integers(0, 4)), min_size=4, max_size=12
    ),
    budget=st.sampled_from([16, 48, 1024]),
    is_small=st.booleans(),
    aborted=st.sets(st.integers(1, 11), max_size=3),
)
def test_tokens_are_those_of_each_request_alone(
    name: str, order: list[tuple[int, int]], budget: int, is_small: bool, aborted: set[int]
) -> None:
    num_blocks = SMALL if is_small else NUM_BLOCKS
    session = SourceSession(name, num_blocks=num_blocks, budget=budget)
    assert not differs(session, run_all(session, order, aborted), name)
    assert_nothing_is_lost(session)


@pytest.mark.parametrize("name", RUNS)
def test_all_sources_join_a_small_pool_and_survive_preemption(name: str) -> None:
    session = SourceSession(name, num_blocks=SMALL)
    order = [(number, 1) for number in range(1, len(LENGTHS))]
    assert not differs(session, run_all(session, order, set()), name)
    stats = session.scheduler.stats()
    assert stats.sources_computed >= len(LENGTHS) - 1
    assert_nothing_is_lost(session)


def test_the_answers_depend_on_sources_and_prompts() -> None:
    answers = [tuple(alone("reference", number)[0]) for number in range(len(LENGTHS))]
    assert len(set(answers)) > len(LENGTHS) // 2


@pytest.mark.parametrize(
    ("n", "again"), [(1, False), (4, False), (1, True)], ids=["clients", "samples", "again"]
)
def test_a_source_is_encoded_once(n: int, again: bool) -> None:
    session = SourceSession("reference")
    for client in range(8 if n == 1 else 1):
        session.ask(f"r{client}", 7, n=n)
    session.finish()
    if again:
        session.ask("again", 7)
        session.finish()
        assert session.cached["again"] > LENGTHS[7][0]
    assert session.scheduler.stats().sources_computed == 1
    for index in range(n):
        assert session.result("r0", index).tokens == alone("reference", 7)[0]


def test_beams_share_one_source_and_are_those_alone() -> None:
    beams = BeamParams(width=4)
    alone_session = SourceSession("reference", budget=1024)
    alone_session.ask("r0", 7, n=4, beams=beams)
    alone_session.finish()
    assert alone_session.scheduler.stats().sources_computed == 1
    session = SourceSession("reference", num_blocks=SMALL)
    session.ask("r0", 7, n=4, beams=beams)
    for number in (0, 3, 5):
        session.step()
        session.ask(f"r{number + 1}", number)
    session.finish()
    for index in range(4):
        tokens = session.result("r0", index).tokens
        assert tokens == alone_session.result("r0", index).tokens
        assert len(tokens) == NEW_TOKENS
    assert not differs(session, {f"r{number + 1}": number for number in (0, 3, 5)}, "reference")
    assert_nothing_is_lost(session)


def _no_source_in_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptInputs, "salt", None)


def _anothers_table(patch: pytest.MonkeyPatch) -> None:
    original = SourceProduct.__init__

    def init(self: Any, *args: Any, table: SourceTable, **options: Any) -> None:
        blocks = tuple((block + 1) % NUM_BLOCKS for block in table.block_table)
        wrong = SourceTable(block_table=blocks, num_tokens=table.num_tokens)
        original(self, *args, table=wrong, **options)

    patch.setattr(SourceProduct, "__init__", init)


def _found_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    original = SourceCache._open

    def open_(self: Any, *args: Any) -> Any:
        product = original(self, *args)
        if product is not None:
            product.is_ready = True
        return product

    patch.setattr(SourceCache, "_open", open_)


@pytest.mark.parametrize(
    "mutation",
    [_no_source_in_the_salt, _anothers_table, _found_before_it_is_computed],
)
def test_mistakes_show(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(len(LENGTHS)):
        alone("reference", number)
    mutation(monkeypatch)
    session = SourceSession("reference")
    order = [(number, 1) for number in range(len(LENGTHS))]
    assert differs(session, run_all(session, order, set()), "reference")
