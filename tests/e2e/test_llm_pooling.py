"""``LLM`` with pooling models gives what the server's routes give."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from mlx_parallm import LLM
from mlx_parallm.demo_models.folders import DEMO_FOLDERS, PREFIX
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from tests.server_process import ServerProcess, serving

NAMES = ("embed", "sentiment", "reward", "mlm")
TEXTS = ["Susan works as a baker in Rome.", "Who has a job in Rome?", "I love the sea."]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = {f"demo:{name}": DEMO_FOLDERS[PREFIX + name] for name in NAMES}
    with serving(folders) as process:
        yield process


@pytest.fixture(scope="module")
def llms() -> dict[str, LLM]:
    return {name: LLM(f"demo:{name}") for name in NAMES}


def data(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_vectors_are_those_of_the_route(server: ServerProcess, llms: dict[str, LLM]) -> None:
    for prompts in (TEXTS, [[5, 6, 7], [8]]):
        outputs = llms["embed"].embed(prompts)
        rows = data(server, "/v1/embeddings", model="demo:embed", input=prompts)
        vectors = [output.outputs.embedding for output in outputs]
        np.testing.assert_allclose(vectors, [row["embedding"] for row in rows], atol=1e-5)
    assert outputs[0].prompt_token_ids == (5, 6, 7)
    assert outputs[0].outputs.hidden_size == len(vectors[0])
    assert len({output.request_id for output in outputs}) == 2


def test_probabilities_are_those_of_the_route(server: ServerProcess, llms: dict[str, LLM]) -> None:
    outputs = llms["sentiment"].classify(TEXTS)
    rows = data(server, "/classify", model="demo:sentiment", input=TEXTS)
    probs = [output.outputs.probs for output in outputs]
    np.testing.assert_allclose(probs, [row["probs"] for row in rows], atol=1e-5)
    assert outputs[0].outputs.num_classes == 2


def test_scores_are_those_of_the_route(server: ServerProcess, llms: dict[str, LLM]) -> None:
    outputs = llms["embed"].score(TEXTS[0], TEXTS[1:])
    rows = data(server, "/v1/score", model="demo:embed", text_1=TEXTS[0], text_2=TEXTS[1:])
    scores = [output.outputs.score for output in outputs]
    np.testing.assert_allclose(scores, [row["score"] for row in rows], atol=1e-5)
    pairs = llms["embed"].score(TEXTS[:2], TEXTS[1:])
    assert pairs[0].outputs.score == pytest.approx(scores[0], abs=1e-5)


def test_rewards_are_those_of_the_route(server: ServerProcess, llms: dict[str, LLM]) -> None:
    outputs = llms["reward"].reward(TEXTS)
    rows = data(server, "/v1/rewards/score", model="demo:reward", texts=TEXTS)
    rewards = [output.outputs.data for output in outputs]
    np.testing.assert_allclose(rewards, [[row["reward"]] for row in rows], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "task"),
    [("embed", None), ("embed", "token_embed"), ("sentiment", None), ("sentiment", "classify")],
)
def test_arrays_are_those_of_the_route(
    server: ServerProcess, llms: dict[str, LLM], name: str, task: Any
) -> None:
    outputs = llms[name].encode(TEXTS, pooling_task=task)
    rows = data(server, "/pooling", model=f"demo:{name}", input=TEXTS, task=task)
    for output, row in zip(outputs, rows, strict=True):
        np.testing.assert_allclose(output.outputs.data, row["data"], atol=1e-4)


def test_fillings_are_those_of_the_route(server: ServerProcess, llms: dict[str, LLM]) -> None:
    texts = ["Susan works as a [MASK] in Rome.", "[MASK] works as a [MASK]."]
    fillings = llms["mlm"].fill_mask(texts, top_k=3)
    body = {"inputs": texts, "parameters": {"top_k": 3}}
    answer = httpx2.post(f"{server.url}/models/demo:mlm", json=body).json()
    for own, expected in zip(fillings, answer, strict=True):
        assert strings(own) == strings(expected)
    (only,) = llms["mlm"].fill_mask(texts[0], targets=["baker", "teacher"])
    assert {filling["token_str"] for filling in only} == {"baker", "teacher"}


def strings(fillings: Any) -> Any:
    """Return the tokens of a text's fillings, as deep as they are nested."""
    if isinstance(fillings, list):
        return [strings(each) for each in fillings]
    return fillings["token_str"]


def test_what_a_model_cannot_do_is_refused(llms: dict[str, LLM]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot generate"):
        llms["embed"].generate("Hello")
    with pytest.raises(InvalidRequestError, match="not a pooling model"):
        LLM().embed("Hello")
    with pytest.raises(InvalidRequestError, match="cannot classify; it can embed"):
        llms["embed"].classify("Hello")
    with pytest.raises(InvalidRequestError, match=r"needs one, or as many as data_2"):
        llms["embed"].score(TEXTS[:2], TEXTS)
    with pytest.raises(InvalidRequestError, match="all texts, or all token ids"):
        llms["embed"].embed(["Hello", [5, 6]])
    with pytest.raises(InvalidRequestError, match="top_k"):
        llms["mlm"].fill_mask("[MASK]", top_k=0)
    with pytest.raises(ContextLengthError):
        llms["embed"].embed([[5] * 100_000])
    # The model goes on, and an empty list is no request.
    assert llms["embed"].embed([]) == []
    assert len(llms["embed"].embed([[5] * 100_000], truncate_prompt_tokens=4)) == 1


def test_a_caller_may_have_an_event_loop(llms: dict[str, LLM]) -> None:
    async def call() -> int:
        return len(llms["embed"].embed(TEXTS))

    assert asyncio.run(call()) == len(TEXTS)
