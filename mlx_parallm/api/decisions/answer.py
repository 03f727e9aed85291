"""From the probabilities of labels to typed answers."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.api.decisions.request import TypedQuestion
from mlx_parallm.api.decisions.schema import (
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    LevelProbability,
    PredicateAnswer,
    PredicateQuestion,
    ScoreAnswer,
    ScoreQuestion,
)

TypedAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


def answer(question: TypedQuestion, probabilities: Sequence[float]) -> TypedAnswer:
    """Return the answer; ``probabilities`` are in the order of the question's labels."""
    match question:
        case PredicateQuestion():
            return PredicateAnswer(name=question.name, probability=probabilities[0])
        case ChoiceQuestion():
            return _choose(question, probabilities)
        case ScoreQuestion():
            return _rate(question, probabilities)


def _choose(question: ChoiceQuestion, probabilities: Sequence[float]) -> ChoiceAnswer:
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    return ChoiceAnswer(
        name=question.name,
        choice=question.choices[best].value,
        confidence=probabilities[best],
        probabilities=[
            ChoiceProbability(value=choice.value, probability=probability)
            for choice, probability in zip(question.choices, probabilities, strict=True)
        ],
    )


def _rate(question: ScoreQuestion, probabilities: Sequence[float]) -> ScoreAnswer:
    return ScoreAnswer(
        name=question.name,
        score=sum(value * probability for value, probability in enumerate(probabilities)),
        confidence=max(probabilities),
        probabilities=[
            LevelProbability(value=value, label=level.label, probability=probability)
            for value, (level, probability) in enumerate(
                zip(question.levels, probabilities, strict=True)
            )
        ],
    )
