"""Bodies of ``POST /v1/decisions``: typed questions about one input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.turns.fields import ANY_GENERATOR, QueueFields

MAX_QUESTIONS = 400
MAX_OPTIONS = 255

Parts = StrictStr | list[dict[str, Any]]


class _Question(NullIsAbsent):
    """The fields of every kind of question."""

    model_config = ConfigDict(extra="ignore")

    name: StrictStr | None = Field(None, max_length=256, description="Comes back with its answer.")
    instructions: Parts = Field(
        min_length=1, description="A text, or parts of type input_text and input_json."
    )


class PredicateQuestion(_Question):
    """A question: how likely is it that a statement about the input is true?"""

    type: Literal["predicate"] = Field(description="Kind of question.")


class Choice(NullIsAbsent):
    """An option of a choice."""

    value: StrictStr | StrictBool = Field(description="What the answer says.")
    description: StrictStr | None = Field(None, description="What the option means.")


class ChoiceQuestion(_Question):
    """Which of these options is right?"""

    type: Literal["choice"] = Field(description="Kind of question.")
    choices: list[Choice] = Field(min_length=2, max_length=MAX_OPTIONS, description="The options.")


class Level(NullIsAbsent):
    """A level of a scale."""

    label: StrictStr = Field(description="What the level is called.")
    description: StrictStr | None = Field(None, description="What the level means.")


class ScoreQuestion(_Question):
    """Where on this scale, from its lowest level to its highest?"""

    type: Literal["score"] = Field(description="Kind of question.")
    levels: list[Level] = Field(
        min_length=2, max_length=MAX_OPTIONS, description="From the lowest."
    )


Question = Annotated[
    PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")
]


class DecisionRequest(QueueFields):
    """Questions about one input, answered by the probabilities of their labels."""

    model_config = ConfigDict(extra="ignore")

    model: StrictStr | None = Field(None, description=ANY_GENERATOR)
    input: Parts = Field(
        min_length=1, description="A text, or messages, function calls and their outputs."
    )
    questions: list[Question] = Field(
        min_length=1, max_length=MAX_QUESTIONS, description="Answered in this order."
    )


class PredicateAnswer(BaseModel):
    """The probability that the statement is true."""

    type: Literal["predicate"] = Field(default="predicate", description="Kind of question.")
    name: str | None = Field(description="The question's.")
    probability: float = Field(description="That the statement is true.")


class ChoiceProbability(BaseModel):
    """An option's probability."""

    value: StrictStr | StrictBool = Field(description="Of the option.")
    probability: float = Field(description="That it is the right one.")


class ChoiceAnswer(BaseModel):
    """The likeliest option; ``confidence`` is its probability."""

    type: Literal["choice"] = Field(default="choice", description="Kind of question.")
    name: str | None = Field(description="The question's.")
    choice: StrictStr | StrictBool = Field(description="The likeliest option.")
    confidence: float = Field(description="Its probability.")
    probabilities: list[ChoiceProbability] = Field(description="Of all options.")


class LevelProbability(BaseModel):
    """A level's probability; ``value`` counts levels from 0."""

    value: int = Field(description="Counts levels from 0.")
    label: str = Field(description="Of the level.")
    probability: float = Field(description="That it is the right one.")


class ScoreAnswer(BaseModel):
    """The expected level, from 0; ``confidence`` is the probability of the likeliest."""

    type: Literal["score"] = Field(default="score", description="Kind of question.")
    name: str | None = Field(description="The question's.")
    score: float = Field(description="The expected level.")
    confidence: float = Field(description="Probability of the likeliest level.")
    probabilities: list[LevelProbability] = Field(description="Of all levels.")


class InputDetails(BaseModel):
    """Prompt tokens that were cached before; nothing is written on request."""

    cached_tokens: int = Field(description="Not computed again.")
    cache_write_tokens: int = Field(default=0, description="Always 0.")


class OutputDetails(BaseModel):
    """Nothing is generated."""

    reasoning_tokens: int = Field(default=0, description="Always 0.")


class DecisionUsage(BaseModel):
    """Token counts, over the prompts of all questions."""

    input_tokens: int = Field(description="Of all prompts.")
    input_tokens_details: InputDetails = Field(description="Of these.")
    output_tokens: int = Field(default=0, description="Always 0.")
    output_tokens_details: OutputDetails = Field(
        default_factory=OutputDetails, description="Of these."
    )
    total_tokens: int = Field(description="Input and output.")


class DecisionResponse(BaseModel):
    """An answer per question, in their order."""

    model: str = Field(description="The name that was asked for, or the first name of the default.")
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer] = Field(
        description="One per question."
    )
    usage: DecisionUsage = Field(description="Token counts.")
