"""Models of each family that takes images compute what transformers computes.

Each prompt runs alone. ``tests/integration/test_images.py`` has the same prompts in batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.models.vision.registry import TOWERS
from mlx_parallm.types.model_input import TOKEN_IDS
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.inputs.rotary_rows import RotarySeam
from mlx_parallm.worker.generation.inputs.rows import InputFeatures
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from scripts.golden_vision_parts import SHOWN_ROWS
from tests.golden_images import vision_names
from tests.image_sessions import MAX_LEN, ImageSession, golden_of, images_of, loaded_of

# TOLERANCE: of the largest value.
TOLERANCE = 1e-4
PROMPTS = [
    (name, number) for name in vision_names() for number in range(len(golden_of(name)["prompts"]))
]


@dataclass(frozen=True)
class Continued:
    """A prompt that a model continued.

    Attributes:
        embeddings: what the first text layer reads, ``[prompt, width]``.
        positions: the position ids of its rows, ``[prompt, axes]``; None if they are places.
        logits: log-probabilities of all tokens behind the prompt.
        tokens: the completion.
    """

    embeddings: np.ndarray
    positions: np.ndarray | None
    logits: np.ndarray
    tokens: list[int]


class LayerInputs:
    """Records what a layer reads, row by row."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def wrap(self, original: Any) -> Methods:
        def recorded(layer: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            self.rows.extend(np.array(x).reshape(-1, x.shape[-1]))
            return original.__call__(layer, x, *args, **kwargs)

        return {"__call__": recorded}


class TurnedRows:
    """Records the position ids by which rows are turned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[np.ndarray] = []
        positions = RotarySeam.positions

        def recorded(
            seam: RotarySeam, sequences: Sequence[ScheduledSequence], features: InputFeatures
        ) -> np.ndarray | None:
            ids = positions(seam, sequences, features)
            self.ids.extend([] if ids is None else ids)
            return ids

        monkeypatch.setattr(RotarySeam, "positions", recorded)


@cache
def continued(name: str, number: int) -> Continued:
    """Return what a model makes of a prompt that runs alone and in one chunk."""
    # Prompts are cut where states are kept.
    session = ImageSession(name, budget=MAX_LEN, num_snapshots=0)
    length = len(golden_of(name)["prompts"][number]["ids"])
    inputs = LayerInputs()
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        WrappedCalls([loaded_of(name).model.layers[0]], inputs.wrap),
    ):
        turned = TurnedRows(monkeypatch)
        session.add_prompt("prompt", number, logprobs=ALL_TOKENS)
        session.finish()
    tokens = session.tokens["prompt", 0]
    logprob = tokens[0].logprob
    assert logprob is not None
    top = dict(logprob.top)
    return Continued(
        np.array(inputs.rows[:length]),
        np.array(turned.ids[:length]) if turned.ids else None,
        np.array([top[token_id] for token_id in range(len(top))]),
        [token.token_id for token in tokens],
    )


def assert_close(actual: Any, expected: Any) -> None:
    """Compare with what transformers has, within a part of the largest value."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_every_family_has_golden_values() -> None:
    published = {golden_of(name)["config"]["model_type"] for name in vision_names()}
    # Under these names checkpoints have the same parts: see the tests of checkpoints.
    assert set(TOWERS) - published == {"internvl_chat", "smolvlm"}


@pytest.mark.parametrize(("name", "number"), PROMPTS)
def test_features_are_those_of_transformers(name: str, number: int) -> None:
    tower = getattr(loaded_of(name).model, TOWER)
    rows = []
    for source in images_of(name).inputs(number):
        arrays = {
            key: mx.array(np.frombuffer(each.data, each.dtype).reshape(each.shape))
            for key, each in source.arrays.items()
            if key != TOKEN_IDS
        }
        rows.extend(np.array(tower(arrays).rows))
    expected = golden_of(name)["prompts"][number]["features"]
    assert bool(rows) == bool(expected)
    if rows:
        assert_close([rows[place] for place in SHOWN_ROWS], expected)


@pytest.mark.parametrize(("name", "number"), PROMPTS)
def test_embeddings_have_features_in_their_places(name: str, number: int) -> None:
    expected = golden_of(name)["prompts"][number]["embeddings"]
    assert_close(continued(name, number).embeddings[expected["places"]], expected["rows"])


@pytest.mark.parametrize(("name", "number"), PROMPTS)
def test_positions_are_those_of_transformers(name: str, number: int) -> None:
    expected, actual = golden_of(name)["prompts"][number]["positions"], continued(name, number)
    if expected is None:
        # A place is a position where no axis differs.
        assert actual.positions is None
    else:
        np.testing.assert_array_equal(actual.positions, np.transpose(expected))


@pytest.mark.parametrize(("name", "number"), PROMPTS)
def test_logits_are_those_of_transformers(name: str, number: int) -> None:
    logits = np.array(golden_of(name)["prompts"][number]["logits"])
    largest = logits.max()
    shifted = logits - largest - np.log(np.exp(logits - largest).sum())
    atol = TOLERANCE * np.abs(logits).max()
    np.testing.assert_allclose(continued(name, number).logits, shifted, rtol=0, atol=atol)


@pytest.mark.parametrize(("name", "number"), PROMPTS)
def test_greedy_tokens_are_those_of_transformers(name: str, number: int) -> None:
    assert continued(name, number).tokens == golden_of(name)["prompts"][number]["tokens"]
