"""From the bodies of jobs to their settings, and which problems they name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from mlx_parallm.api.fine_tuning.request import job_settings, metadata_filter, session_of
from mlx_parallm.api.fine_tuning.schema import CreateJob, PreferenceHyperparameters
from mlx_parallm.api.http.errors import path_of
from mlx_parallm.api.mezo.fields import MAX_NUMBER
from mlx_parallm.api.mezo.schema import MAX_STEPS, Pairs
from mlx_parallm.training.jobs.records import JobSettings, Method
from mlx_parallm.types.errors import InvalidRequestError

BODY = {"model": "m", "training_file": "file-1"}


def settings_of(num_examples: int, *, is_old: bool = False, **hyper: Any) -> JobSettings:
    """Return the settings of a job with preferences, or supervised in the old form."""
    if is_old:
        body = CreateJob.model_validate(BODY | {"hyperparameters": hyper})
        assert body.hyperparameters is not None
        used, method = body.hyperparameters, Method.SUPERVISED
    else:
        own = {"type": "dpo", "dpo": {"hyperparameters": hyper}}
        body = CreateJob.model_validate(BODY | {"method": own})
        assert body.method is not None
        assert body.method.dpo is not None
        used, method = body.method.dpo.hyperparameters, Method.DPO
    return job_settings(body, method, used, "o", "m", num_examples)


@pytest.mark.parametrize("field", PreferenceHyperparameters.model_fields)
@pytest.mark.parametrize("value", [-1, 0, "3", "", True, {}, [0, "a"], 10**18, math.inf])
def test_problems_name_fields_and_no_types(field: str, value: Any) -> None:
    own = {"type": "dpo", "dpo": {"hyperparameters": {field: value}}}
    try:
        CreateJob.model_validate(BODY | {"method": own})
    except ValidationError as problem:
        path = f"method.dpo.hyperparameters.{field}"
        for each in problem.errors():
            place, _, index = path_of(each["loc"]).partition(f"{path}.")
            assert (place or index).removeprefix(path).isdigit() or place == path


#: EXTREMES: the least and the greatest values of numbers.
EXTREMES: Mapping[str, tuple[float, float]] = {
    "n_epochs": (1, 1000),
    "batch_size": (1, 65536),
    "learning_rate_multiplier": (5e-324, MAX_NUMBER),
    "rank": (1, 1024),
    "alpha": (5e-324, MAX_NUMBER),
    "max_tokens": (2, 10**18),
    "eval_every": (1, MAX_STEPS),
    "beta": (5e-324, MAX_NUMBER),
}


def test_extremes_are_those_of_the_schema() -> None:
    others = {"targets", "layers"}
    assert set(PreferenceHyperparameters.model_fields) == EXTREMES.keys() | others
    for field, (_, most) in EXTREMES.items():
        if field != "max_tokens":
            with pytest.raises(ValidationError, match="less than or equal"):
                PreferenceHyperparameters.model_validate({field: 2 * int(most)})


@pytest.mark.parametrize("num_examples", [1, 11_000])
@pytest.mark.parametrize("which", [0, 1], ids=["least", "greatest"])
@pytest.mark.parametrize("field", EXTREMES)
def test_each_job_has_a_session(field: str, which: int, num_examples: int) -> None:
    hyper: dict[str, Any] = {field: EXTREMES[field][which]}
    settings = settings_of(num_examples, **hyper)
    objective = Pairs.model_validate({"beta": settings.hyperparameters["beta"]})
    assert session_of(settings, objective, head=False).eval_every == settings.eval_every


@pytest.mark.parametrize("is_old", [False, True])
def test_too_many_steps_are_refused(*, is_old: bool) -> None:
    hyper = {"n_epochs": 1000, "batch_size": 1}
    assert settings_of(10_000, is_old=is_old, **hyper).num_steps == MAX_STEPS
    with pytest.raises(InvalidRequestError, match="11000000 steps") as refusal:
        settings_of(11_000, is_old=is_old, **hyper)
    place = "hyperparameters" if is_old else "method.dpo.hyperparameters"
    assert refusal.value.param == f"{place}.n_epochs"


@pytest.mark.parametrize(
    ("num_examples", "epochs", "batch", "num_steps", "eval_every"),
    [(31, 2, 16, 4, 2), (32, 2, 16, 4, 2), (33, 3, 16, 7, 3), (3, 2, 16, 2, 1), (5, 1, 2, 3, 3)],
)
def test_epochs_read_all_examples(
    num_examples: int, epochs: int, batch: int, num_steps: int, eval_every: int
) -> None:
    settings = settings_of(num_examples, n_epochs=epochs, batch_size=batch)
    assert (settings.num_steps, settings.eval_every) == (num_steps, eval_every)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ([], [True] * 4),
        ([("metadata", "null")], [True, False, False, False]),
        ([("metadata[a]", "b")], [False, False, True, True]),
        ([("metadata[a]", "b"), ("metadata[c[0]]", "")], [False, False, False, True]),
        ([("metadata[a]", "B")], [False] * 4),
        ([("metadata[a]", "b"), ("metadata[a]", "c")], [False] * 4),
        ([("limit", "3")], [True] * 4),
    ],
)
def test_metadata_chooses_jobs(query: list[tuple[str, str]], expected: list[bool]) -> None:
    kept: list[Mapping[str, str] | None] = [None, {}, {"a": "b"}, {"a": "b", "c[0]": ""}]
    wanted = metadata_filter(dict(query).get("metadata"), query)
    assert [wanted(each) for each in kept] == expected


@pytest.mark.parametrize(
    "query", [[("metadata", "a")], [("metadata", "")], [("metadata", "null"), ("metadata[a]", "b")]]
)
def test_other_filters_are_refused(query: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidRequestError, match="metadata"):
        metadata_filter(query[0][1], query)
