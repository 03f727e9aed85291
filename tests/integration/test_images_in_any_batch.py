"""Prompts with images give the same tokens in any batch as alone, and nothing is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.images.processor import host_array
from mlx_parallm.types.model_input import ModelInput, Span
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.image_mutations import SCHEDULED_MUTATIONS, Mutation
from tests.image_sessions import MAX_LEN, ImageSession, golden_of, images_of
from tests.integration.test_parity_generate import BLOCK_SIZE

pytestmark = pytest.mark.slow

#: ``NUM_PROMPTS``, ``MOST_IMAGES``: of a model, and of a prompt.
NUM_PROMPTS, MOST_IMAGES = 12, 4
#: ``LONGEST_IMAGE``: rows of the longest image that prompts have.
LONGEST_IMAGE = 48
#: ``FACTORS``: of pixels, which make other images of equal shapes.
FACTORS = (-1.0, 0.5, -0.5)
NEW_TOKENS = 10
#: ``RUNS``: models and how they run: packed and split, waited for, ahead and compiled.
RUNS = (
    ("llava", ReferenceAttention),
    ("gemma3", AheadAttention),
    ("qwen2_5_vl", CompiledAttention),
    ("qwen3_vl", AheadAttention),
    ("qwen3_5", ReferenceAttention),
    ("qwen3_5", CompiledAttention),
)


class Prompt(NamedTuple):
    """A prompt with images."""

    ids: tuple[int, ...]
    inputs: tuple[ModelInput, ...]


def scaled(source: ModelInput, factor: float) -> ModelInput:
    """Return another image of the same shape."""
    arrays = {
        key: host_array(
            np.float32(factor) * np.frombuffer(array.data, array.dtype).reshape(array.shape)
        )
        if array.dtype == "float32"
        else array
        for key, array in source.arrays.items()
    }
    return replace(source, arrays=arrays, content=f"{factor} {source.content}")


@cache
def prompts_of(name: str) -> list[Prompt]:
    """Return ragged prompts with up to four images, some of which begin alike."""
    draw = random.Random(name)
    golden = golden_of(name)["prompts"]
    sources = [
        (golden[number]["ids"][source.span.start : source.span.stop], own)
        for number in range(len(golden))
        for source in images_of(name).inputs(number)
        if source.span is not None
        for own in (source, *(scaled(source, factor) for factor in FACTORS))
    ]
    sources = [each for each in sources if len(each[0]) <= LONGEST_IMAGE]
    beginning = [draw.randrange(30, 60) for _ in range(5)]
    prompts: list[Prompt] = []
    for number in range(NUM_PROMPTS):
        ids, inputs = list[int](), list[ModelInput]()
        if number % 2:
            ids += beginning
        for place in range(number % (MOST_IMAGES + 1)):
            # Prompts that begin alike have one first image.
            own, source = draw.choice(sources if place or not number % 2 else sources[:1])
            inputs.append(replace(source, span=Span(len(ids), len(ids) + len(own))))
            ids += [*own, *(draw.randrange(30, 60) for _ in range(draw.randrange(8)))]
        ids += [draw.randrange(30, 60) for _ in range(1 + draw.randrange(8))]
        prompts.append(Prompt(tuple(ids), tuple(inputs)))
    return prompts


def ask(session: ImageSession, request_id: str, number: int) -> None:
    prompt = prompts_of(session.name)[number]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0)
    request = GenerateRequest(
        request_id=request_id,
        model="m",
        prompt_ids=prompt.ids,
        params=params,
        inputs=prompt.inputs,
    )
    session.scheduler.add(request, seed=0, end_ids=frozenset())


@cache
def alone(name: str, number: int) -> list[int]:
    """Return the tokens of a prompt that is computed at once, with nothing beside it."""
    session = ImageSession(name, budget=MAX_LEN)
    ask(session, "alone", number)
    session.finish()
    return session.result("alone").tokens


def run_all(
    session: ImageSession, order: list[tuple[int, int]], aborted: set[int]
) -> dict[str, int]:
    """Run prompts that join after some steps each; the number of each that was not aborted."""
    numbers: dict[str, int] = {}
    for place, (number, steps) in enumerate(order):
        numbers[f"r{place}"] = number
        ask(session, f"r{place}", number)
        for _ in range(steps):
            session.step()
        late = f"r{place - 1}"
        if place in aborted and session.scheduler.has_request(late):
            session.scheduler.abort(late)
            del numbers[late]
    session.finish()
    return numbers


def assert_nothing_is_lost(session: ImageSession) -> None:
    """Assert that all blocks and features are given back."""
    session.scheduler.reset_prefix_cache(reset_running=False)
    session.add("last", (33, 34, 35), max_tokens=1)
    session.finish()
    session.scheduler.reset_prefix_cache(reset_running=False)
    assert session.kv.num_free == session.kv.num_blocks
    assert session.scheduler.stats().input_bytes == 0
    assert session.images.is_empty


def shortest_pool(name: str) -> int:
    """Return the blocks of the longest prompt and its answer."""
    longest = max(len(prompt.ids) for prompt in prompts_of(name))
    return -(-(longest + NEW_TOKENS) // BLOCK_SIZE) + 1


@pytest.mark.parametrize(("name", "backend"), RUNS)
@settings(max_examples=5)
@given(
    order=st.lists(
        st.tuples(st.integers(0, NUM_PROMPTS - 1), st.integers(0, 4)), min_size=4, max_size=12
    ),
    budget=st.sampled_from([16, 24, 64]),
    is_small=st.booleans(),
    aborted=st.sets(st.integers(1, 11), max_size=3),
)
def test_tokens_are_those_of_each_prompt_alone(
    name: str,
    backend: type[ReferenceAttention],
    order: list[tuple[int, int]],
    budget: int,
    is_small: bool,
    aborted: set[int],
) -> None:
    num_blocks = shortest_pool(name) + 2 if is_small else 256
    session = ImageSession(name, backend, num_blocks=num_blocks, budget=budget)
    for request_id, number in run_all(session, order, aborted).items():
        assert session.result(request_id).tokens == alone(name, number)
    assert_nothing_is_lost(session)


@pytest.mark.parametrize(("name", "backend"), RUNS)
@pytest.mark.parametrize("is_small", [False, True])
def test_images_run_together_and_survive_preemption(
    name: str, backend: type[ReferenceAttention], is_small: bool
) -> None:
    num_blocks = shortest_pool(name) + 2 if is_small else 256
    session = ImageSession(name, backend, num_blocks=num_blocks, budget=128)
    order = [(number, 0) for number in range(NUM_PROMPTS)]
    for request_id, number in run_all(session, order, set()).items():
        assert session.result(request_id).tokens == alone(name, number)
    stats = session.scheduler.stats()
    assert stats.images_found > 0
    assert is_small == (stats.num_preemptions > 0)
    if name == "llava" and not is_small:  # all its images have one shape
        assert max(session.images.runs) > 1, "no two images ran together"
    assert_nothing_is_lost(session)


def test_prompts_are_ragged() -> None:
    prompts = prompts_of("llava")
    assert {len(prompt.inputs) for prompt in prompts} == set(range(MOST_IMAGES + 1))
    assert len({len(prompt.ids) for prompt in prompts}) > NUM_PROMPTS // 2


@pytest.mark.parametrize(
    ("name", "mutation"),
    [each for each in SCHEDULED_MUTATIONS if each[0] in {name for name, _ in RUNS}],
)
def test_mistakes_of_the_scheduler_show(
    name: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [alone(name, number) for number in range(NUM_PROMPTS)]
    mutation(monkeypatch)
    session = ImageSession(name, budget=24)
    order = [(number, 1) for number in range(NUM_PROMPTS)]
    numbers = run_all(session, order, set())
    assert [session.result(each).tokens for each in numbers] != wanted
