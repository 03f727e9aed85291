"""Decisions of the embedded model: the same whatever is asked with them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server_process import ServerProcess

TEXT = "The parcel never came, and I want my money back. " * 4
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": "The writer is content."},
    {
        "type": "choice",
        "instructions": "What is it about?",
        "choices": [{"value": f"topic {number}"} for number in range(30)],
    },
    {
        "type": "score",
        "instructions": "How angry?",
        "levels": [{"label": "calm"}, {"label": "mad"}],
    },
]


def test_an_answer_does_not_depend_on_the_other_questions(live_server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="x") as client:

        def ask(questions: list[Any]) -> Any:
            return client.decisions.create(
                model="mlx-parallm-demo", input=TEXT, questions=questions
            )

        together = ask(QUESTIONS)
        alone = [ask([question]) for question in QUESTIONS]
    predicate = alone[0].answers[0].probability
    assert together.answers[0].probability == pytest.approx(predicate, rel=1e-4)
    for number in (1, 2):
        values = [option.probability for option in together.answers[number].probabilities]
        assert sum(values) == pytest.approx(1)
        others = alone[number].answers[0].probabilities
        assert values == pytest.approx([option.probability for option in others], abs=1e-5)
    assert alone[2].usage.input_tokens_details.cached_tokens > 0
    assert together.usage.input_tokens == sum(answer.usage.input_tokens for answer in alone)
