"""Routes that classify texts, over encoders without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.pooling.vectors.arrays import activated
from mlx_parallm.types.pooling import PoolingInput
from tests.encoder_requests import post, refused_field
from tests.fake_encoders import FakeEncoders, computed, make_encoder

LABELS = ("calm", "angry", "sad")
CLASSIFIER = {"tasks": ("classify", "embed"), "labels": LABELS}


def encoders(**changes: Any) -> FakeEncoders:
    return FakeEncoders(make_encoder(**CLASSIFIER | changes))


def logits(served: FakeEncoders, *ids: int) -> np.ndarray:
    return computed(PoolingInput(ids, "classify"), served.models()[0].info)


def test_softmax_and_sigmoid_are_those_of_transformers() -> None:
    values = np.array([[-1000.0, 0.0, 1000.0], [1.0, 2.0, 0.5]], dtype=np.float32)
    exact = np.exp(values[1].astype(np.float64))
    np.testing.assert_allclose(activated(values, None), [[0, 0, 1], exact / exact.sum()], atol=1e-6)
    np.testing.assert_array_equal(
        activated(values, "single_label_classification"), activated(values, None)
    )
    sigmoid = 1 / (1 + np.exp(-values[1].astype(np.float64)))
    scores = activated(values, "multi_label_classification")
    np.testing.assert_allclose(scores, [[0, 0.5, 1], sigmoid], atol=1e-6)
    for problem_type in (None, "single_label_classification", "multi_label_classification"):
        np.testing.assert_allclose(
            activated(values[1:, :1], problem_type), sigmoid[None, :1], atol=1e-6
        )
    np.testing.assert_array_equal(activated(values, "regression"), values)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify", "/v1/classifications"])
async def test_the_likeliest_label_and_all_probabilities(path: str) -> None:
    served = encoders()
    answer = (await post(served, path, {"input": ["w5 w6", "w7"], "request_id": "a"})).json()
    assert answer["id"] == "classify-a"
    assert answer["object"] == "list"
    assert answer["model"] == "encoder"
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    for index, ids in enumerate([(2, 5, 6, 3), (2, 7, 3)]):
        wanted = activated(logits(served, *ids), None)
        entry = answer["data"][index]
        assert (entry["index"], entry["num_classes"]) == (index, 3)
        np.testing.assert_allclose(entry["probs"], wanted, rtol=1e-6)
        assert entry["label"] == LABELS[int(wanted.argmax())]


async def test_logits_are_given_where_they_are_asked_for() -> None:
    served = encoders()
    body = {"input": [[9, 8]], "use_activation": False, "model": "encoder"}
    answer = (await post(served, "/classify", body)).json()
    np.testing.assert_allclose(answer["data"][0]["probs"], logits(served, 9, 8), rtol=1e-6)


async def test_conversations_are_read_by_the_chat_template() -> None:
    conversation = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    other = [{"role": "user", "content": [{"type": "text", "text": "w7"}]}]
    served = FakeEncoders(make_encoder(chats=True, **CLASSIFIER))
    answer = await post(served, "/classify", {"messages": conversation})
    assert answer.status_code == 200, answer.text
    await post(served, "/classify", {"messages": [conversation, other]})
    batches = [[read.token_ids for read in each.inputs] for each in served.thread.requests]
    assert batches == [[(2, 5, 2, 6)], [(2, 5, 2, 6), (2, 7)]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "w5", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["w5", ""]}, "input"),
        ({"input": ["w5", None]}, "input"),
        ({"input": {"text": "w5"}}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [[5, 100]]}, "input"),
        ({"input": "w5 " * 20}, "input"),
        ({"input": "w5", "truncate_prompt_tokens": 17}, "truncate_prompt_tokens"),
        ({"input": "w5", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "w5", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "w5", "use_activation": "no"}, "use_activation"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": [{"role": "user", "content": "w5"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "w5"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": "w5"}], "chat_template": "{{ 1 }}"},
            "chat_template",
        ),
    ],
)
async def test_bad_requests_name_the_field(body: dict[str, Any], param: str) -> None:
    served = encoders()
    answer = await post(served, "/classify", body)
    assert refused_field(answer) == (400, param), answer.text
    assert served.thread.requests == []


async def test_models_that_cannot_classify_are_refused() -> None:
    served = FakeEncoders(make_encoder("embedder"))
    for name in ("embedder", None):
        answer = await post(served, "/classify", {"input": "w5", "model": name})
        assert refused_field(answer) == (400, "model")
    answer = await post(served, "/classify", {"input": "w5", "model": "none"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_long_inputs_are_cut_at_either_end() -> None:
    served = encoders()
    text = " ".join(f"w{number}" for number in range(5, 35))
    for side in ("left", "right"):
        body = {"input": text, "truncate_prompt_tokens": 3, "truncation_side": side}
        assert (await post(served, "/classify", body)).status_code == 200
    left, right = [request.inputs[0].token_ids for request in served.thread.requests]
    assert (left, right) == ((33, 34, 3), (2, 5, 6))
