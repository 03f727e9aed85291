"""Requests of every route with messages say where the latest turn begins, for models with state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.api.turns.prepare import prepare_turn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.offline.generation import OfflineRequests, chat_prompt
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.work import StateCache
from tests.fake_engine import FakeEngine
from tests.unit.api.http.test_cache_scope import chosen, post
from tests.unit.api.turns.test_prepare import demo

TALK = [
    {"role": "system", "content": "rule"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
# BEFORE: as ``ByteTokenizer`` renders it.
BEFORE = "system: rule\nuser: one\nassistant: two\nuser: "
STATES = StateCache(num_states=8, interval=2048)
FEW = {"model": "alias", "max_tokens": 1}
ROUTES: dict[str, tuple[dict[str, Any], str | None]] = {
    "/v1/chat/completions": (FEW | {"messages": TALK}, BEFORE),
    "/v1/responses": ({"model": "alias", "input": TALK}, BEFORE),
    "/v1/messages": (FEW | {"system": "rule", "messages": TALK[1:]}, BEFORE),
    "/v1/rl/rollout": (FEW | {"prompts": [{"messages": TALK}]}, BEFORE),
    "/v1/completions": (FEW | {"prompt": "one"}, None),
    "/generate": ({"text": "one", "sampling_params": {"max_new_tokens": 1}}, None),
    "/inference/v1/generate": (
        {"model": "alias", "token_ids": [1], "sampling_params": {"max_tokens": 1}},
        None,
    ),
}
# Routes whose requests share a beginning with others of the same answer.
SHARING: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/score": (
        {"model": "alias", "query": "same", "items": ["b", "c"], "label_token_ids": [1, 2]},
        "same",
    ),
    "/v1/rl/logprobs": (
        {
            "model": "alias",
            "items": [
                {"prompt_token_ids": [65, 66], "completion_token_ids": [token]} for token in (1, 2)
            ],
        },
        "AB",
    ),
}


def with_state(model: GenerationModel) -> GenerationModel:
    return replace(model, state_cache=STATES)


async def submitted(
    path: str, body: dict[str, Any], *, states: StateCache | None = STATES
) -> list[GenerateRequest]:
    engine = FakeEngine(state_cache=states)
    engine.script = chosen
    response = await post(engine, ServerConfig(), path, body, None)
    requests: list[GenerateRequest] = []
    while not engine.submitted.empty():
        requests.append(engine.submitted.get())
    assert requests, response.text
    return requests


def before(request: GenerateRequest) -> str | None:
    start = request.turn_start
    return None if start is None else bytes(request.prompt_ids[:start]).decode()


@pytest.mark.parametrize("path", ROUTES)
async def test_a_route_says_where_the_latest_turn_begins(path: str) -> None:
    body, expected = ROUTES[path]
    assert [before(request) for request in await submitted(path, body)] == [expected]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("states", [None, replace(STATES, num_states=0)])
async def test_it_is_not_asked_of_models_that_keep_no_states(
    path: str, states: StateCache | None
) -> None:
    (request,) = await submitted(path, ROUTES[path][0], states=states)
    assert request.turn_start is None


@pytest.mark.parametrize("path", SHARING)
async def test_requests_of_an_answer_say_what_they_share(path: str) -> None:
    body, shared = SHARING[path]
    requests = await submitted(path, body)
    assert len(requests) == 2
    assert {before(request) for request in requests} == {shared}


async def test_questions_share_what_is_before_them() -> None:
    texts = ("It is late.", "It is early.")
    questions = [{"type": "predicate", "instructions": text} for text in texts]
    body = {"model": "alias", "input": "words", "questions": questions}
    requests = await submitted("/v1/decisions", body)
    (shared,) = {before(request) for request in requests}
    assert shared is not None
    assert shared.endswith("words\n</input>\n\n")


async def test_a_prompt_that_is_cut_begins_elsewhere() -> None:
    model = with_state(demo())
    turn = TurnRequest(request_id="r", messages=TALK)
    whole = (await prepare_turn(turn, model)).request
    assert whole.turn_start is not None
    text = model.tokenizer.decode(whole.prompt_ids[: whole.turn_start], skip_special_tokens=False)
    assert text.endswith("two<|im_end|>\n<|im_start|>")
    assert whole.answer_start is not None
    text = model.tokenizer.decode(whole.prompt_ids[: whole.answer_start], skip_special_tokens=False)
    assert text.endswith(TALK[-1]["content"] + "<|im_end|>\n<|im_start|>")
    cut = (await prepare_turn(replace(turn, truncate=8), model)).request
    assert cut.turn_start is cut.answer_start is None


async def test_a_message_that_is_continued_is_behind_the_latest_turn() -> None:
    model = with_state(demo())
    turn = TurnRequest(
        request_id="r",
        messages=[*TALK, {"role": "assistant", "content": "fo"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    begun, plain = [
        (await prepare_turn(each, model)).request
        for each in (turn, TurnRequest(request_id="r", messages=TALK))
    ]
    assert begun.turn_start == plain.turn_start is not None
    assert begun.answer_start is None


@pytest.mark.parametrize("is_parted", [False, True])
def test_a_chat_of_a_program_says_it_too(is_parted: bool) -> None:
    model = with_state(demo())
    parted = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in TALK]
    prompt = chat_prompt(parted if is_parted else TALK, model, {}, None)
    ((_, request),) = OfflineRequests().make([prompt], lambda: model, None, None)
    text = model.tokenizer.decode(
        request.prompt_ids[: request.turn_start], skip_special_tokens=False
    )
    assert text.endswith("two<|im_end|>\n<|im_start|>")
    ((_, request),) = OfflineRequests().make(["one"], lambda: model, None, None)
    assert request.turn_start is None
