"""Models that take images compute in any batch what transformers computes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.models.vision.features import Arrays, Features, Tower
from mlx_parallm.types.model_input import POSITIONS, TOKEN_IDS, InputKind, ModelInput
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.golden_images import vision_names
from tests.image_mutations import LOADED_MUTATIONS, SCHEDULED_MUTATIONS, Mutation
from tests.image_sessions import ImageSession, golden_of, images_of, loaded_of
from tests.integration.test_parity_generate import BLOCK_SIZE


def arrays_of(source: ModelInput) -> dict[str, mx.array]:
    return {
        name: mx.array(np.frombuffer(each.data, each.dtype).reshape(each.shape))
        for name, each in source.arrays.items()
        if name not in (TOKEN_IDS, POSITIONS)
    }


def computed(tower: Tower, images: Sequence[Arrays]) -> list[Features]:
    """Return the features of images, and check the number of stages."""
    stages = tower.stages(images)
    for _ in range(tower.num_stages - 1):
        mx.eval(next(stages))
    with pytest.raises(StopIteration) as end:
        next(stages)
    return end.value.value


@pytest.mark.parametrize("name", vision_names())
def test_towers_compute_images_of_equal_shapes_together(name: str) -> None:
    tower: Tower = getattr(loaded_of(name).model, TOWER)
    numbers = range(len(golden_of(name)["prompts"]))
    sources = [source for number in numbers for source in images_of(name).inputs(number)]
    for source in {source.shape_key: source for source in sources}.values():
        first = arrays_of(source)
        noise = {
            key: array + mx.random.normal(array.shape, key=mx.random.key(1))
            if array.dtype == mx.float32
            else array
            for key, array in first.items()
        }
        images = [first, noise, first]
        together = computed(tower, images)
        for arrays, own in zip(images, together, strict=True):
            alone = tower(arrays)
            parts = zip((own.rows, *own.layers), (alone.rows, *alone.layers), strict=True)
            for actual, expected in parts:
                assert mx.abs(actual - expected).max() <= 1e-5 * mx.abs(expected).max()
        assert not mx.allclose(together[0].rows, together[1].rows, rtol=1e-2, atol=1e-3)


# QUICK: a model of each kind of tower and of text; with other backends, and in a crowd, others are
# slow. MLX compiles many kernels for some.
QUICK = ("gemma3", "internvl", "llava", "pixtral", "qwen2_5_vl", "qwen3_vl_moe")


def slow_unless(is_quick: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a case."""
    return [] if is_quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(
            *(backend, name),
            marks=slow_unless(backend is ReferenceAttention or name in QUICK),
        )
        for backend in (ReferenceAttention, AheadAttention, CompiledAttention)
        for name in vision_names()
    ],
)
def test_tokens_in_batches_are_those_of_transformers(
    name: str, backend: type[ReferenceAttention]
) -> None:
    session = ImageSession(name, backend)
    assert InputKind.IMAGE in session.runner.info.input_kinds
    check_all(session)


def check_all(session: ImageSession) -> None:
    """Run ragged prompts in chunks through images, which join while others decode.

    Tokens are checked after each step, so that the first wrong one ends the run.
    """
    numbers: dict[str, int] = {}

    def step() -> None:
        session.step()
        for request_id, _ in session.tokens:
            session.check(request_id, numbers[request_id])

    count = len(golden_of(session.name)["prompts"])
    for number in range(count):
        numbers[f"first {number}"] = numbers[f"second {number}"] = number
        session.add_prompt(f"first {number}", number)
        step()
    for number in range(count):
        session.add_prompt(f"second {number}", number)
    while session.has_work():
        step()
    session.finish()
    assert {request_id for request_id, _ in session.tokens} == set(numbers)


def test_a_image_is_computed_once_and_its_blocks_are_reused() -> None:
    session = ImageSession("llava")
    for request_id in ("first", "second"):
        session.add_prompt(request_id, 0)
        session.finish()
        session.check(request_id, 0)
    assert session.images.num_computed == 1
    length = len(golden_of("llava")["prompts"][0]["ids"])
    assert session.cached["second"] == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow_unless(name in QUICK)) for name in vision_names()]
)
def test_preempted_prompts_compute_their_images_again(name: str) -> None:
    prompts = golden_of(name)["prompts"]
    # Room for the longest prompt with its completion, and for little more.
    longest = max(len(prompt["ids"]) + len(prompt["tokens"]) for prompt in prompts)
    num_blocks = max(24, longest // BLOCK_SIZE + 2)
    session = ImageSession(name, AheadAttention, num_blocks=num_blocks, budget=64)
    # Twice each, so that prompts of some size run side by side whichever goes first.
    numbers = 2 * list(range(len(prompts)))
    for place, number in enumerate(numbers):
        session.add_prompt(f"{place}", number)
    session.finish()
    assert session.scheduler.stats().num_preemptions > 0
    for place, number in enumerate(numbers):
        session.check(f"{place}", number)


@pytest.mark.parametrize(("name", "mutation"), [*LOADED_MUTATIONS, *SCHEDULED_MUTATIONS])
def test_the_tokens_show_what_is_left_out(
    name: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model is loaded without the mistake: the check at load would find some.
    session = ImageSession(name)
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check_all(session)
