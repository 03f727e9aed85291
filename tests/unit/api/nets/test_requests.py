"""From bodies to requests, and from results to answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.http.uploads import validated
from mlx_parallm.api.nets.answer import act_fields, file_dtypes, predict_fields
from mlx_parallm.api.nets.request import act_request, predict_request
from mlx_parallm.api.nets.schema import MAX_SEED, ActRequest, PredictRequest
from mlx_parallm.nets.model import NetModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.nets import (
    ActParams,
    ActResult,
    Distribution,
    NetRequest,
    NetResults,
    NetSignature,
    SequenceUse,
    TensorSpec,
)
from tests.nets import IMAGE, OBS, json_numpy, policy, recurrent

ROWS = [[0.0, 1.0, 2.0, 3.0]] * 2
PLAIN = replace(policy(), policy=None)
VALUED = replace(
    policy(value="value"),
    outputs=(*policy().outputs, TensorSpec("value", "bfloat16", (-1, 1))),
)


def model(signature: NetSignature) -> NetModel:
    return NetModel(
        names=("net",), root="net", created=0, signature=signature, weight_bytes=0, max_rows=8
    )


def act(signature: NetSignature, **fields: Any) -> NetRequest:
    body = validated(ActRequest, {"observations": ROWS} | fields)
    return act_request(body, model(signature), request_id="r", owner="client")


def predict(signature: NetSignature, **fields: Any) -> NetRequest:
    body = validated(PredictRequest, {"inputs": {"obs": ROWS}} | fields)
    return predict_request(body, model(signature), request_id="r", owner="client")


def test_a_request_has_the_rows_and_how_they_act() -> None:
    request = act(policy(), deterministic=True, seed=7, action_mask=[[1, 0]] * 2)
    assert (request.request_id, request.model, request.num_rows) == ("r", "net", 2)
    assert request.inputs["obs"].tolist() == ROWS
    params = request.act
    assert isinstance(params, ActParams)
    assert (params.is_deterministic, params.seed) == (True, 7)
    assert params.action_mask is not None
    assert predict(PLAIN).act is None


def test_requests_without_a_seed_draw_differently() -> None:
    seeds = {request.act.seed for request in (act(policy()) for _ in range(8)) if request.act}
    assert len(seeds) > 1
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize(
    "observations",
    [ROWS, {"obs": ROWS}, json_numpy(np.array(ROWS)), {"obs": json_numpy(np.array(ROWS))}],
)
def test_the_only_observation_needs_no_name(observations: Any) -> None:
    assert act(policy(), observations=observations).inputs["obs"].tolist() == ROWS


def test_state_comes_with_the_request_or_is_kept() -> None:
    state = {spec.name: np.ones((2, 1, 8), np.float32) for spec in recurrent().states}
    request = act(recurrent(), hidden_states=state, episode_start=[True, False])
    assert request.states is not None
    assert request.states["lstm.c"].tolist() == state["lstm.c"].tolist()
    assert request.episode_start is not None
    request = predict(recurrent(), sequence_id="s", sequence_start=True, sequence_end=True)
    assert request.sequence == SequenceUse(
        owner="client", sequence_id="s", is_start=True, is_end=True
    )


SHADOW = {"hidden_states": {"lstm.h": [], "lstm.c": []}}
TWO_INPUTS = replace(policy(), inputs=(OBS, IMAGE))


@pytest.mark.parametrize(
    ("signature", "fields", "param", "why"),
    [
        (PLAIN, {}, "model", "net is no policy; use /v1/predict"),
        (policy(), {"observations": [[1]]}, "observations", "observations.obs has the shape"),
        (TWO_INPUTS, {}, "observations", "an object with obs, image"),
        (policy(), {"observations": None}, "observations", "Field required"),
        (policy(), {"seed": -1}, "seed", "greater than or equal to 0"),
        (policy(), {"seed": MAX_SEED + 1}, "seed", "less than or equal to"),
        (policy(), {"seed": 1.5}, "seed", "integer"),
        (policy(), {"deterministic": "yes"}, "deterministic", "boolean"),
        (policy(), {"return": ["value"]}, "return", "'values'"),
        (policy(), {"return": "values"}, "return", "list"),
        (policy(), {"return": ["values"]}, "return", "return has values"),
        (policy(), {"return": ["hidden_states"]}, "return", "return has hidden_states"),
        (policy(Distribution.SQUASHED_GAUSSIAN), {"return": ["entropy"]}, "return", "squashed"),
        (policy(Distribution.DETERMINISTIC), {"return": ["log_probs"]}, "return", "deterministic"),
        (policy(), {"sequence_id": "s"}, "sequence_id", "no state"),
        (policy(), {"hidden_states": {"h": [1]}}, "hidden_states", "does not know 'h'"),
        (policy(), {"hidden_states": [1]}, "hidden_states", "dictionary"),
        (recurrent(), {"sequence_id": ""}, "sequence_id", "at least 1"),
        (recurrent(), {"sequence_id": "s" * 129}, "sequence_id", "at most 128"),
        (recurrent(), {"sequence_id": 7}, "sequence_id", "string"),
        (recurrent(), {"sequence_start": True}, "sequence_start", "needs a sequence_id"),
        (recurrent(), {"sequence_end": True}, "sequence_end", "needs a sequence_id"),
        (recurrent(), {"sequence_id": "s"} | SHADOW, "sequence_id", "not both"),
    ],
)
def test_fields_that_do_not_suit_the_policy_are_refused(
    signature: NetSignature, fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        act(signature, **fields)
    assert why in str(refusal.value)
    assert refusal.value.param == param


def test_outputs_that_the_net_lacks_are_refused() -> None:
    assert predict(PLAIN, outputs=["logits"]).num_rows == 2
    with pytest.raises(InvalidRequestError, match="outputs has 'y'; the net returns logits"):
        predict(PLAIN, outputs=["logits", "y"])


ARRAY = np.arange(2.0, dtype=np.float32)
ACTED: dict[str, np.ndarray] = {
    ActResult.ACTIONS: ARRAY,
    ActResult.ACTIONS_FOR_ENV: ARRAY,
    ActResult.LOG_PROBS: ARRAY,
    ActResult.VALUES: ARRAY,
    ActResult.ENTROPY: ARRAY,
    "dist.logits": ARRAY,
}
RESULTS = NetResults(outputs=ACTED, states={"lstm.h": ARRAY}, version="v7")
ALWAYS = {"actions", "actions_for_env", "model", "policy_version"}


@pytest.mark.parametrize(
    ("returns", "names"),
    [
        (None, {"log_probs", "value_estimates", "new_hidden_states"}),
        ([], set[str]()),
        (["entropy"], {"entropy"}),
        (["dist", "values"], {"dist", "value_estimates"}),
        (["hidden_states"], {"new_hidden_states"}),
    ],
)
def test_acts_return_what_is_wanted(returns: list[str] | None, names: set[str]) -> None:
    body = validated(ActRequest, {"observations": ROWS, "return": returns})
    fields = act_fields(body, "net", RESULTS)
    assert {name for name, value in fields.items() if value is not None} == ALWAYS | names
    assert (fields["model"], fields["policy_version"]) == ("net", "v7")
    assert fields.get("dist", {"logits": ARRAY}) == {"logits": ARRAY}


def test_a_kept_state_is_not_returned_but_its_weights_are_told() -> None:
    body = validated(ActRequest, {"observations": ROWS, "sequence_id": "s"})
    fields = act_fields(body, "net", replace(RESULTS, has_other_weights=True))
    assert fields["new_hidden_states"] is None
    assert fields["state_has_other_weights"] is True


def test_predictions_return_all_outputs_or_some() -> None:
    results = NetResults(outputs={"x": ARRAY, "y": ARRAY}, version="v")
    body = validated(PredictRequest, {"inputs": {}})
    assert predict_fields(body, "net", results)["outputs"].keys() == {"x", "y"}
    body = validated(PredictRequest, {"inputs": {}, "outputs": ["y"]})
    assert predict_fields(body, "net", results)["outputs"].keys() == {"y"}


def test_dtypes_are_known_by_the_names_in_a_file() -> None:
    assert file_dtypes(VALUED)["value"] == "bfloat16"
    assert file_dtypes(recurrent())["new_hidden_states.lstm.h"] == "float32"


@pytest.mark.parametrize("num_rows", [0, 9])
def test_a_model_itself_refuses_too_many_rows(num_rows: int) -> None:
    net = model(policy())
    net.check(act(policy()))
    request = replace(act(policy()), num_rows=num_rows)
    with pytest.raises(InvalidRequestError, match=f"{num_rows} rows; a request has 1 to 8"):
        net.check(request)
