"""Typed questions: their text, their labels' probabilities, and their answers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.decisions.scoring import LabelTree
from mlx_parallm.api.turns.continuation import continuation_ids
from mlx_parallm.types.errors import OverloadedError
from mlx_parallm.types.events import FinishReason, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import TokenLogprob
from mlx_parallm.types.token_limit import TokenLimit
from tests.fake_engine import FakeEngine, prompt_event, serve_fake
from tests.fakes import ByteTokenizer

PREDICATE = {"type": "predicate", "instructions": "It is late."}
DEFAULT_LOGPROB = -9.0


def likes(wanted: dict[str, float]) -> Any:
    """Return a script that gives the last byte of these beginnings of labels a log-probability."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield prompt_event(request)
        text = bytes(request.prompt_ids).decode()
        begun = text.rpartition("Answer:")[2]
        top = []
        for token in request.params.logprob_token_ids:
            label = (begun + chr(token)).lstrip()
            logprob = DEFAULT_LOGPROB if label else 0.0
            top.append((token, wanted.get(label, logprob)))
        yield TokenEvent(
            request_id=request.request_id,
            index=0,
            token_ids=(1,),
            text="",
            logprobs=(TokenLogprob(1, -1.0, tuple(top)),),
            finish_reason=FinishReason.LENGTH,
        )

    return script


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    engine = served[0]
    engine.refusal = None
    while not engine.submitted.empty():
        engine.submitted.get()
    return engine


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


@pytest.fixture
def client(served: tuple[FakeEngine, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_the_sdk_gets_typed_answers(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = likes({"Y": math.log(0.3), "N": math.log(0.1), "B": math.log(0.6), "2": 0.0})
    options = [{"value": "true"}, {"value": True, "description": "sure"}]
    questions: Any = [
        PREDICATE | {"name": "late"},
        {"type": "choice", "instructions": "Which?", "choices": options},
        {"type": "score", "instructions": "How?", "levels": [{"label": x} for x in "abc"]},
    ]
    decision = client.decisions.create(model="alias", input="23:59", questions=questions)
    late, which, how = decision.answers
    assert late.type == "predicate"
    # The further bytes of Yes and No are as likely as the other's, but for one more of Yes.
    assert late.name == "late"
    yes, no = 0.3 * math.exp(2 * DEFAULT_LOGPROB), 0.1 * math.exp(DEFAULT_LOGPROB)
    assert late.probability == pytest.approx(yes / (yes + no))
    assert which.type == "choice"
    assert which.choice is True
    assert which.confidence == pytest.approx(0.6 / (0.6 + math.exp(-9)))
    assert [label.value for label in which.probabilities] == ["true", True]
    assert how.type == "score"
    assert how.score == pytest.approx((2 + math.exp(-9)) / (1 + 2 * math.exp(-9)))
    assert [(label.value, label.label) for label in how.probabilities] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert decision.usage.input_tokens_details.cached_tokens == 3 * 3
    assert decision.usage.output_tokens == 0
    prompts = [bytes(engine.submitted.get().prompt_ids).decode() for _ in range(3)]
    assert len({prompt.partition("</input>")[0] for prompt in prompts}) == 1
    assert "A: true\nB: true (sure)\n" in prompts[1]


def test_without_a_model_the_first_answers(url: str, engine: FakeEngine) -> None:
    engine.script = likes({})
    body = {"input": "23:59", "questions": [PREDICATE]}
    answer = httpx2.post(f"{url}/v1/decisions", json=body).json()
    assert answer["model"] == engine.submitted.get().model == "org/fake"


def test_a_conversation_is_an_input(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = likes({})
    given_input: Any = [
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1]}}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
    ]
    client.decisions.create(model="alias", input=given_input, questions=[PREDICATE])  # type: ignore[list-item]
    prompt = bytes(engine.submitted.get().prompt_ids).decode()
    for part in ('user: {"a":[1]}', 'call of f: {"x": 1}', "output: 42", "assistant: done"):
        assert part in prompt


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": "other"}, "model"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [7]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "call_id": "c"}]}, "input"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "predicate"}]}, "questions"),
        ({"questions": [{"type": "predicate", "instructions": ""}]}, "questions"),
        ({"questions": [{"type": "predicate", "instructions": [{"type": "x"}]}]}, "questions"),
        ({"questions": [{"type": "essay", "instructions": "x"}]}, "questions"),
        ({"questions": [PREDICATE | {"type": "choice", "choices": [{"value": "a"}]}]}, "questions"),
        (
            {"questions": [PREDICATE | {"type": "choice", "choices": [{"value": "a"}] * 2}]},
            "questions",
        ),
        (
            {"questions": [PREDICATE | {"type": "score", "levels": [{"label": "a"}] * 256}]},
            "questions",
        ),
    ],
)
def test_a_bad_request_names_its_field(
    engine: FakeEngine, served: tuple[FakeEngine, str], changes: dict[str, Any], param: str
) -> None:
    body = {"model": "alias", "input": "x", "questions": [PREDICATE]} | changes
    response = httpx2.post(f"{served[1]}/v1/decisions", json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
    assert engine.submitted.empty()


def test_a_full_queue_is_a_429(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.refusal = OverloadedError("full")
    with pytest.raises(openai.RateLimitError):
        client.decisions.create(model="alias", input="x", questions=[PREDICATE])  # type: ignore[list-item]


def test_an_aborted_decision_is_a_503(engine: FakeEngine, client: openai.OpenAI) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield prompt_event(request)
        yield TokenEvent(
            request_id=request.request_id,
            index=0,
            token_ids=(),
            text="",
            finish_reason=FinishReason.ABORT,
        )

    engine.script = script
    with pytest.raises(openai.InternalServerError) as failure:
        client.decisions.create(model="alias", input="x", questions=[PREDICATE])  # type: ignore[list-item]
    assert failure.value.status_code == 503


@given(st.lists(st.text("abc", min_size=3, max_size=3), min_size=2, max_size=27, unique=True))
def test_probabilities_are_those_of_whole_labels(labels: list[str]) -> None:
    tokens = [tuple(label.encode()) for label in labels]
    tree = LabelTree.of(tokens)
    logprobs = {
        (start, token): -0.1 * token + 0.3 * len(start) * sum(start) / 100
        for start, following in tree.branches.items()
        for token in following
    }
    weights = [
        math.exp(sum(logprobs[label[:place], label[place]] for place in range(3)))
        for label in tokens
    ]
    expected = [weight / sum(weights) for weight in weights]
    assert tree.probabilities(logprobs) == pytest.approx(expected)
    assert next(iter(tree.branches)) == ()
    assert sum(map(len, tree.branches.values())) == len({t[:i] for t in tokens for i in (1, 2, 3)})


class SpacingTokenizer(ByteTokenizer):
    """Writes a space before every text."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        return [32, *text.encode()]


def test_a_continuation_has_no_beginning_of_a_text() -> None:
    tokenizer = SpacingTokenizer()
    assert continuation_ids(tokenizer, "Answer:", " A") == tuple(b" A")
