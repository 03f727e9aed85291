"""Which classifiers moderate, and what OpenAI's client reads of their verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from mlx_parallm.api.pooling.vectors.arrays import activated
from mlx_parallm.api.pooling.vectors.moderations import CATEGORIES, SHORT, harmful, moderates
from mlx_parallm.types.pooling import PoolingInput
from tests.encoder_requests import post, refused_field
from tests.fake_encoders import FakeEncoders, computed, make_encoder
from tests.fake_engine import FakeEngine, serve_fake

MULTI = "multi_label_classification"


def classifier(*labels: str, name: str = "guard", problem_type: Any = None) -> Any:
    return make_encoder(name, tasks=("classify",), labels=labels, problem_type=problem_type)


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (("OK", *SHORT), list(SHORT.values())),
        (("neutral", "toxic"), ["toxic"]),
        (("nothate", "hate"), ["hate"]),
        (("NOT-HATE", "HATE"), ["hate"]),
        (("non-offensive", "offensive"), ["offensive"]),
        (("SAFE", "INJECTION"), ["INJECTION"]),
        (("Self_Harm/Intent", "violence_graphic"), ["self-harm/intent", "violence/graphic"]),
        (("toxic", "severe_toxic", "noise"), ["toxic", "severe_toxic", "noise"]),
        # The short names mean nothing alone.
        (("S", "H"), ["S", "H"]),
    ],
)
def test_labels_become_categories(labels: tuple[str, ...], wanted: list[str]) -> None:
    assert list(harmful(labels).values()) == wanted


@pytest.mark.parametrize(
    ("labels", "problem_type", "wanted"),
    [
        (("neutral", "toxic"), None, True),
        (("toxic",), None, True),
        (("toxic", "insult"), MULTI, True),
        (("toxic", "insult"), None, False),
        (("POSITIVE", "NEGATIVE"), None, False),
        (("LABEL_0",), None, False),
        (("LABEL_0", "LABEL_1"), MULTI, False),
        (("toxic",), "regression", False),
        ((), None, False),
    ],
)
def test_what_tells_of_harm(labels: tuple[str, ...], problem_type: Any, wanted: bool) -> None:
    assert moderates(classifier(*labels, problem_type=problem_type).info) is wanted


def test_openais_client_reads_the_verdicts() -> None:
    model = classifier("toxic", "violence", "self_harm", problem_type=MULTI)
    engine = FakeEngine()
    engine.pooling = FakeEncoders(classifier("a", "b", name="topics"), model)
    with serve_fake(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        several = client.moderations.create(input=[f"w{number}" for number in range(5, 65)])
        (single,) = client.moderations.create(input="w6", model="guard").results
        parts: Any = [{"type": "text", "text": "w5"}, {"type": "text", "text": "w6"}]
        (together,) = client.moderations.create(input=parts).results
    assert (several.model, several.id[:5]) == ("guard", "modr-")
    assert single == several.results[1]
    for number, verdict in zip(range(5, 65), several.results, strict=True):
        logits = computed(PoolingInput((2, number, 3), "classify"), model.info)
        toxic, violence, self_harm = activated(logits, MULTI).tolist()
        scores = verdict.category_scores
        np.testing.assert_allclose([scores.violence, scores.self_harm], [violence, self_harm])
        assert scores.hate == 0
        extra = verdict.category_scores.model_extra or {}
        np.testing.assert_allclose(extra["toxic"], toxic)
        assert verdict.categories.violence is (violence >= 0.5)
        assert verdict.flagged is (max(toxic, violence, self_harm) >= 0.5)
        applied = verdict.category_applied_input_types
        assert (applied.violence, applied.hate) == (["text"], [])
    assert {verdict.flagged for verdict in several.results} == {True, False}
    logits = computed(PoolingInput((2, 5, 6, 3), "classify"), model.info)
    np.testing.assert_allclose(
        together.category_scores.violence, activated(logits, MULTI)[1], rtol=1e-6
    )


async def test_the_harmless_label_flags_nothing() -> None:
    served = FakeEncoders(classifier("safe", "unsafe"))
    served.thread.compute = lambda _, info: np.array([9, -9], dtype=np.float32)
    (verdict,) = (await post(served, "/v1/moderations", {"input": "w5"})).json()["results"]
    assert verdict["flagged"] is False
    assert set(verdict["categories"]) == {*CATEGORIES, "unsafe"}
    served.thread.compute = lambda _, info: np.array([0, 0], dtype=np.float32)
    (verdict,) = (await post(served, "/v1/moderations", {"input": "w5"})).json()["results"]
    assert (verdict["flagged"], verdict["category_scores"]["unsafe"]) == (True, 0.5)


async def test_nothing_that_is_loaded_may_moderate() -> None:
    for served in (
        FakeEncoders(),
        FakeEncoders(make_encoder(), classifier("POSITIVE", "NEGATIVE")),
        # It could, if it were asked for by its name.
        FakeEncoders(classifier("joy", "anger", problem_type=MULTI)),
    ):
        answer = await post(served, "/v1/moderations", {"input": "w5"})
        assert answer.status_code == 501
        assert answer.headers["x-should-retry"] == "false"
    named = await post(served, "/v1/moderations", {"input": "w5", "model": "guard"})
    assert named.status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["w5", 5]}, "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "input"),
        ({"input": [{"type": "text"}]}, "input"),
        ({"input": [{"type": "text", "text": "w5"}, "w5"]}, "input"),
        ({"input": "w5 " * 30}, "input"),
        ({"input": "w5", "model": "topics"}, "model"),
    ],
)
async def test_bad_requests_name_the_field(body: dict[str, Any], param: str) -> None:
    served = FakeEncoders(classifier("neutral", "toxic"), classifier("a", "b", name="topics"))
    answer = await post(served, "/v1/moderations", body)
    assert refused_field(answer) == (400, param), answer.text
    assert served.thread.requests == []
