"""Bodies of ``POST /v1/decisions``: typed questions about one input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.schemas.common import INT64, NullIsAbsent

MAX_QUESTIONS = 400
MAX_OPTIONS = 255

Parts = StrictStr | list[dict[str, Any]]


class _Question(NullIsAbsent):
    """What every kind of question has."""

    model_config = ConfigDict(extra="ignore")

    name: StrictStr | None = Field(None, max_length=256, description="Comes back with its answer.")
    instructions: Parts = Field(
        min_length=1, description="A text, or parts of type input_text and input_json."
    )


class PredicateQuestion(_Question):
    """How likely is it that a statement about the input is true?"""

    type: Literal["predicate"]


class Choice(NullIsAbsent):
    """An option of a choice."""

    value: StrictStr | StrictBool
    description: StrictStr | None = None


class ChoiceQuestion(_Question):
    """Which of these options is right?"""

    type: Literal["choice"]
    choices: list[Choice] = Field(min_length=2, max_length=MAX_OPTIONS)


class Level(NullIsAbsent):
    """A level of a scale."""

    label: StrictStr
    description: StrictStr | None = None


class ScoreQuestion(_Question):
    """Where on this scale, from its lowest level to its highest?"""

    type: Literal["score"]
    levels: list[Level] = Field(min_length=2, max_length=MAX_OPTIONS)


Question = Annotated[
    PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")
]


class DecisionRequest(NullIsAbsent):
    """Questions about one input, answered by the probabilities of their labels."""

    model_config = ConfigDict(extra="ignore")

    model: StrictStr = Field(description="A served model's name.")
    input: Parts = Field(
        min_length=1, description="A text, or messages, function calls and their outputs."
    )
    questions: list[Question] = Field(min_length=1, max_length=MAX_QUESTIONS)
    priority: StrictInt = Field(0, ge=-INT64, lt=INT64, description="Lower runs first.")
    cache_salt: StrictStr | None = Field(
        None, max_length=1024, description="Share cached prefixes only with the same salt."
    )


class PredicateAnswer(BaseModel):
    """The probability that the statement is true."""

    type: Literal["predicate"] = "predicate"
    name: str | None
    probability: float


class ChoiceProbability(BaseModel):
    """An option's probability."""

    value: StrictStr | StrictBool
    probability: float


class ChoiceAnswer(BaseModel):
    """The likeliest option; ``confidence`` is its probability."""

    type: Literal["choice"] = "choice"
    name: str | None
    choice: StrictStr | StrictBool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(BaseModel):
    """A level's probability; ``value`` counts levels from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(BaseModel):
    """The expected level, from 0; ``confidence`` is the probability of the likeliest."""

    type: Literal["score"] = "score"
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class InputDetails(BaseModel):
    """Prompt tokens that were cached before; nothing is written on request."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """Nothing is generated."""

    reasoning_tokens: int = 0


class DecisionUsage(BaseModel):
    """Token counts, over the prompts of all questions."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int = 0
    output_tokens_details: OutputDetails = Field(default_factory=OutputDetails)
    total_tokens: int


class DecisionResponse(BaseModel):
    """An answer per question, in their order."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage
