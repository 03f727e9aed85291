"""``POST /v1/decisions``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.decisions.request import TypedQuestion, ask, input_text
from mlx_parallm.api.decisions.schema import (
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    DecisionRequest,
    DecisionResponse,
    DecisionUsage,
    InputDetails,
    LevelProbability,
    PredicateAnswer,
    PredicateQuestion,
    ScoreAnswer,
    ScoreQuestion,
)
from mlx_parallm.api.decisions.scoring import FIELDS, EncodedQuestion, QuestionEncoder, score
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.turns.generation import named_by, unless_disconnected
from mlx_parallm.api.turns.prelude import Admitted, PreludeDep
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.template_time import at_one_time
from mlx_parallm.types.request import GenerateRequest

routes = Routes(CHAT, body_limit=INPUT, short=True, in_any_process=True)
TypedAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


@routes.post("/v1/decisions", batchable=True, response_model=DecisionResponse)
async def create_decision(body: DecisionRequest, prelude: PreludeDep) -> Response:
    """Answer questions about an input by the probabilities of their labels; nothing is sampled."""
    num_questions = len(body.questions)
    admitted = await prelude.admit(body.model, num_prompts=num_questions, fields=FIELDS)
    with named_by(FIELDS):
        questions = await encode(body, admitted.model)
    template = GenerateRequest(
        request_id=f"decision-{prelude.answer_id}",
        model=admitted.model.names[0],
        prompt_ids=questions[0].prompt_ids,
        priority=body.priority,
        client=prelude.client,
        cache_salt=body.cache_salt,
    )
    return await unless_disconnected(prelude.request, _decide(body, admitted, template, questions))


async def encode(body: DecisionRequest, model: GenerationModel) -> list[EncodedQuestion]:
    """Every question's prompt and labels.

    Raises:
        InvalidRequestError: the input or a question is malformed.
    """
    text = input_text(body.input)
    asked_questions = [ask(question, number) for number, question in enumerate(body.questions)]

    @at_one_time()
    def work() -> list[EncodedQuestion]:
        encoder = QuestionEncoder(model, text)
        return [encoder.encode(question) for question in asked_questions]

    # The labels of every question are encoded too.
    length = len(text) + sum(
        len(question.text) + 16 * len(question.labels) for question in asked_questions
    )
    return await maybe_in_thread(work, length)


async def _decide(
    body: DecisionRequest,
    admitted: Admitted,
    template: GenerateRequest,
    questions: list[EncodedQuestion],
) -> Response:
    scores, cached_tokens = await score(admitted, template, questions)
    answers = [
        answer(question, encoded.tree.probabilities(logprobs))
        for question, encoded, logprobs in zip(body.questions, questions, scores, strict=True)
    ]
    # The prompts of the questions count, each once.
    input_tokens = sum(len(encoded.prompt_ids) for encoded in questions)
    usage = DecisionUsage(
        input_tokens=input_tokens,
        input_tokens_details=InputDetails(cached_tokens=cached_tokens),
        total_tokens=input_tokens,
    )
    whole = DecisionResponse(model=admitted.name, answers=answers, usage=usage)
    return JSONResponse(whole.model_dump())


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
