"""Labels of tokens become those of words and of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.pooling.hf.entities import LabelledTokens, entities
from mlx_parallm.types.pooling import TokenSpan

LABELS = ("O", "B-PER", "I-PER", "LOC")
# Words of one, two and three tokens, and scores of the labels.
TOKENS: list[tuple[str, bool, list[float]]] = [
    ("an", False, [0.1, 0.7, 0.1, 0.1]),
    ("##na", True, [0.1, 0.0, 0.9, 0.0]),
    ("lee", False, [0.2, 0.0, 0.6, 0.2]),
    ("tom", False, [0.0, 0.6, 0.4, 0.0]),
    ("par", False, [0.5, 0.0, 0.1, 0.4]),
    ("##i", True, [0.4, 0.0, 0.0, 0.6]),
    ("##s", True, [0.3, 0.0, 0.0, 0.7]),
    ("rome", False, [0.0, 0.0, 0.0, 1.0]),
]


def join(tokens: Sequence[str]) -> str:
    return " ".join(tokens).replace(" ##", "")


def found(strategy: str) -> list[tuple[Any, ...]]:
    """Return the label, the score, the text and the span of each entity."""
    spans = [
        TokenSpan(
            token_id=number,
            token=token,
            start=10 * number,
            end=10 * number + 5,
            is_special=False,
            continues=continues,
        )
        for number, (token, continues, _) in enumerate(TOKENS)
    ]
    scores = np.array([row for _, _, row in TOKENS])
    tokens = LabelledTokens(spans, range(1, 9), scores, LABELS)
    return [
        (
            entity.get("entity", entity.get("entity_group")),
            round(entity["score"], 4),
            entity["word"],
            entity["start"] // 10,
            entity["end"] // 10,
        )
        for entity in entities(tokens, strategy, join)
    ]


def test_every_token_has_a_label_of_its_own() -> None:
    first, *_, last = found("none")
    assert first == ("B-PER", 0.7, "an", 0, 0)
    assert last == ("LOC", 1.0, "rome", 7, 7)
    assert len(found("none")) == len(TOKENS)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            "simple",
            [
                ("PER", 0.7333, "anna lee", 0, 2),
                ("PER", 0.6, "tom", 3, 3),
                ("O", 0.5, "par", 4, 4),
                ("LOC", 0.7667, "##is rome", 5, 7),
            ],
        ),
        (
            "first",
            [
                ("PER", 0.65, "anna lee", 0, 2),
                ("PER", 0.6, "tom", 3, 3),
                ("O", 0.5, "paris", 4, 6),
                ("LOC", 1.0, "rome", 7, 7),
            ],
        ),
        (
            "average",
            [
                ("PER", 0.55, "anna lee", 0, 2),
                ("PER", 0.6, "tom", 3, 3),
                ("LOC", 0.7833, "paris rome", 4, 7),
            ],
        ),
        (
            "max",
            [
                ("PER", 0.75, "anna lee", 0, 2),
                ("PER", 0.6, "tom", 3, 3),
                ("LOC", 0.85, "paris rome", 4, 7),
            ],
        ),
    ],
)
def test_words_are_labelled_and_neighbours_joined(
    strategy: str, expected: list[tuple[Any, ...]]
) -> None:
    assert found(strategy) == expected


def test_a_text_without_tokens_has_no_entities() -> None:
    nothing = LabelledTokens([], [], np.zeros((0, 4)), LABELS)
    assert all(entities(nothing, strategy, join) == [] for strategy in ("none", "simple", "max"))
