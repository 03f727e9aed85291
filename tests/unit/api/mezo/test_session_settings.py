"""From bodies of new sessions to their settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.api.mezo.prompts import prompt_examples
from mlx_parallm.api.mezo.request import OBJECTIVES, config_maker
from mlx_parallm.api.mezo.rows import Row
from mlx_parallm.api.mezo.schema import CreateSession, OfPrompts
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.training import ChoiceInput

CANDIDATES: dict[str, Any] = {
    "kind": "candidates",
    "candidates": {"good": "a joy", "bad": "dull"},
}


def body_of(**fields: Any) -> CreateSession:
    return CreateSession.model_validate({"model": "m", "objective": CANDIDATES, **fields})


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_the_seed_draws_first_factors_too(seed: int) -> None:
    config = config_maker(body_of(seed=seed), "m")("id", 0)
    assert (config.seed, config.trainable.seed) == (seed, seed)


@pytest.mark.parametrize(
    ("objective", "estimator", "averages"),
    [
        ({}, {}, False),
        ({"normalize": True}, {}, True),
        ({}, {"preset": "paper"}, True),
        ({}, {"preset": "paper", "epsilon": 0.01}, True),
        ({"normalize": False}, {"preset": "paper"}, False),
        ({"normalize": None}, {"preset": "paper"}, True),
    ],
)
async def test_candidates_are_normalised_as_the_objective_or_the_preset_says(
    objective: dict[str, Any], estimator: dict[str, Any], averages: bool
) -> None:
    body = body_of(objective=CANDIDATES | objective, estimator=estimator)
    # Later requests of a session read its kept objective.
    kept = config_maker(body, "m")("id", 0).objective
    for read in (body.objective, OBJECTIVES.validate_python(kept)):
        assert await averaged(cast("OfPrompts", read)) is averages


async def test_sessions_of_earlier_versions_add_up() -> None:
    assert await averaged(cast("OfPrompts", OBJECTIVES.validate_python(CANDIDATES))) is False


async def averaged(objective: OfPrompts) -> bool:
    """True if the candidates of examples have mean log-probabilities."""
    tokenizer = SimpleNamespace(encode=lambda text, **_: [ord(letter) for letter in text])
    info = SimpleNamespace(vocab_size=128)
    model = cast(
        "GenerationModel", SimpleNamespace(tokenizer=tokenizer, info=info, max_model_len=64)
    )
    rows = [Row.model_validate({"text": "a film", "label": "good"})]
    (example,) = await prompt_examples(rows, objective, model, "data")
    assert isinstance(example.input, ChoiceInput)
    return example.input.averages
