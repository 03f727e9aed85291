"""Tensors of requests against the signature of a net."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.nets.checks import (
    MAX_STEPS,
    MAX_TIMES,
    Rows,
    checked_actions,
    checked_inputs,
    checked_mask,
    checked_starts,
    checked_states,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.nets import Choices, Distribution, NetSignature, TensorSpec
from tests.nets import IMAGE, OBS, STATES, TIMED, policy, recurrent

MAX_ROWS = 4096
ROW = [0.0, 1.0, 2.0, 3.0]
DICT = NetSignature(inputs=(OBS, IMAGE), outputs=(TensorSpec("y", "float32", (-1, 2)),))
IMAGES = np.zeros((2, 3, 2, 2), np.uint8)
MIXED = NetSignature(inputs=(TIMED, replace(TIMED, name="more")), outputs=DICT.outputs)


def checked(signature: NetSignature, values: dict[str, Any]) -> Rows:
    return checked_inputs(signature, values, "inputs", max_rows=MAX_ROWS)


def test_inputs_are_returned_in_the_dtypes_of_the_signature() -> None:
    rows = checked(DICT, {"image": IMAGES.tolist(), "obs": [ROW, ROW]})
    assert (rows.num_rows, rows.num_times, rows.lead) == (2, None, (2,))
    assert rows.arrays["obs"].dtype == np.float32
    assert rows.arrays["image"].dtype == np.uint8


def test_arrays_that_fit_are_not_copied() -> None:
    assert checked(DICT, {"image": IMAGES, "obs": [ROW, ROW]}).arrays["image"] is IMAGES


@pytest.mark.parametrize("times", [1, 3])
def test_inputs_have_time_or_leave_it_out(times: int) -> None:
    signature = recurrent()
    assert checked(signature, {"obs": [[ROW] * times] * 2}).lead == (2, times)
    assert checked(signature, {"obs": [ROW] * 2}).lead == (2,)


@pytest.mark.parametrize(
    ("signature", "values", "why"),
    [
        (DICT, {}, "lacks 'image'; expected obs: float32 [rows, 4]; image: uint8 [rows, 3, 2, 2]"),
        (DICT, {"obs": [ROW]}, "lacks 'image'"),
        (DICT, {"obs": [ROW], "image": IMAGES, "x" * 99: 1}, f"does not know '{'x' * 64}'"),
        (DICT, {"obs": [ROW], "image": IMAGES}, "different numbers of rows: 1, 2"),
        (DICT, {"obs": [ROW] * 2, "image": IMAGES[..., :1]}, "the shape [2, 3, 2, 1]"),
        (DICT, {"obs": [ROW] * 2, "image": IMAGES / 2}, "inputs.image is of float64"),
        (policy(), {"obs": ROW}, "inputs.obs has the shape [4]; expected obs: float32 [rows, 4]"),
        (policy(), {"obs": []}, "inputs.obs has the shape [0]"),
        (policy(), {"obs": np.zeros((0, 4))}, "has 0 rows"),
        (policy(), {"obs": np.zeros((MAX_ROWS + 1, 4))}, "has 4097 rows; a request has 1 to 4096"),
        (policy(), {"obs": [[0, 1, 2, math.nan]]}, "inputs.obs has NaN or infinite"),
        (policy(), {"obs": [[0, 1, 2, 1e200]]}, "inputs.obs has NaN or infinite"),
        (policy(), {"obs": 1.0}, "the shape []"),
        (recurrent(), {"obs": ROW}, "the shape [4]"),
        (recurrent(), {"obs": np.zeros((1, 0, 4))}, "has 0 times"),
        (recurrent(), {"obs": np.zeros((10**12, 0, 4))}, "has 1000000000000 rows"),
        (recurrent(), {"obs": np.zeros((1, MAX_TIMES + 1, 4))}, "times; a request has 1 to"),
        (recurrent(), {"obs": np.zeros((17, MAX_TIMES, 4))}, f"at most {MAX_STEPS} steps"),
        (MIXED, {"obs": [[ROW]], "more": [ROW]}, "time in some inputs and not in others"),
        (MIXED, {"obs": [[ROW]], "more": [[ROW] * 2]}, "different numbers of times: 1, 2"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    signature: NetSignature, values: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        checked(signature, values)
    assert why in str(refusal.value)
    assert refusal.value.param == "inputs"


@pytest.mark.parametrize("dtype", ["int64", "uint8", "uint64"])
@pytest.mark.parametrize("number", [-1, 5, 2**63, 0.5, math.nan])
def test_numbers_that_are_no_choice_are_refused(dtype: str, number: float) -> None:
    spec = TensorSpec("obs", dtype, (-1,), (Choices(0, 1, 5),))
    signature = NetSignature(inputs=(spec,), outputs=DICT.outputs, allows_non_finite=True)
    assert checked(signature, {"obs": [0, 4]}).num_rows == 2
    with pytest.raises(InvalidRequestError, match=r"inputs\.obs"):
        checked(signature, {"obs": [0, number]})


@pytest.mark.parametrize("shape", [(-1, 2, 2), (-1, -1, 2, 2)])
def test_elements_have_choices_of_their_own(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("obs", "int32", shape, (Choices(1, 2, 5), Choices(2, 4, 1 << 30)))
    signature = NetSignature(inputs=(spec,), outputs=DICT.outputs)
    lead = [2, 3] if spec.has_time else [2]
    array = np.tile(np.array([[-7, 4], [2**30 - 1, 0]]), [*lead, 1, 1])
    checked(signature, {"obs": array.tolist()})
    for place, number, most in (((0, 1), 5, 4), ((0, 1), -1, 4), ((1, 1), 2**30, 2**30 - 1)):
        wrong = array.copy()
        wrong[(-1,) * len(lead) + place] = number
        element = 2 * place[0] + place[1]
        why = rf"obs has {number} as element {element} of a row, which may be one of 0 to {most}\."
        with pytest.raises(InvalidRequestError, match=why):
            checked(signature, {"obs": wrong.tolist()})


def test_a_net_may_take_numbers_that_are_not_finite() -> None:
    signature = replace(policy(), allows_non_finite=True)
    rows = checked(signature, {"obs": [[0, 1, math.nan, math.inf]]})
    assert np.isnan(rows.arrays["obs"][0, 2])


def state(rows: int) -> dict[str, Any]:
    return {spec.name: np.zeros((rows, *spec.shape[1:])).tolist() for spec in STATES}


TWO = Rows({}, 2)
TWO_THREE = Rows({}, 2, 3)


def test_states_are_taken_as_an_answer_gave_them() -> None:
    states = checked_states(recurrent(), state(2), TWO, "hidden_states")
    assert states is not None
    assert {name: (array.shape, array.dtype.name) for name, array in states.items()} == {
        "lstm.h": ((2, 1, 8), "float32"),
        "lstm.c": ((2, 1, 8), "float32"),
    }
    assert checked_states(recurrent(), {}, TWO, "hidden_states") is None
    assert checked_states(policy(), None, TWO, "hidden_states") is None


@pytest.mark.parametrize(
    ("signature", "values", "why"),
    [
        (recurrent(), {"lstm.h": state(2)["lstm.h"]}, "lacks 'lstm.c'"),
        (recurrent(), state(3), "hidden_states.lstm.h has 3 rows; expected 2"),
        (recurrent(), state(2) | {"lstm.h": [[0.0] * 8] * 2}, "the shape [2, 8]"),
        (recurrent(), state(2) | {"lstm.c": [[[math.inf] * 8]] * 2}, "lstm.c has NaN or infinite"),
        (policy(), state(2), "does not know 'lstm.c'; expected nothing"),
    ],
)
def test_states_that_do_not_fit_are_refused(
    signature: NetSignature, values: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        checked_states(signature, values, TWO, "hidden_states")
    assert why in str(refusal.value)
    assert refusal.value.param == "hidden_states"


def test_episodes_start_by_row_or_by_time() -> None:
    for rows, values in ((TWO, [True, False]), (TWO_THREE, [1, 0]), (TWO_THREE, [[0, 1, 0]] * 2)):
        starts = checked_starts(values, rows, "episode_start")
        assert starts is not None
        assert starts.dtype == bool
        assert starts.tolist() == np.array(values, bool).tolist()
    assert checked_starts(None, TWO, "episode_start") is None


@pytest.mark.parametrize("values", [[True], [[True, False]], [0.0, 1.0], [0, 2], True])
def test_starts_that_do_not_fit_are_refused(values: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        checked_starts(values, TWO, "episode_start")
    assert refusal.value.param == "episode_start"


MULTI = policy(Distribution.MULTI_CATEGORICAL, 5, sizes=(2, 3))


@pytest.mark.parametrize(
    ("signature", "rows", "mask"),
    [
        (policy(), TWO, [[True, False], [True, True]]),
        (policy(), TWO, [[0, 1], [1, 1]]),
        (recurrent(), TWO_THREE, [[[0, 1]] * 3] * 2),
        (MULTI, TWO, [[0, 1, 1, 0, 0]] * 2),
    ],
)
def test_masks_become_booleans(signature: NetSignature, rows: Rows, mask: Any) -> None:
    assert signature.policy is not None
    array = checked_mask(signature, signature.policy, mask, rows, "action_mask")
    assert array is not None
    assert array.tolist() == np.array(mask, bool).tolist()


@pytest.mark.parametrize(
    ("signature", "rows", "mask", "why"),
    [
        (policy(), TWO, [[1, 0], [0, 0]], "forbids every choice of row 1"),
        (recurrent(), TWO_THREE, [[[1, 1]] * 3, [[1, 1], [1, 1], [0, 0]]], "of row 1 at time 2"),
        (MULTI, TWO, [[1, 1, 0, 0, 0]] * 2, "forbids every choice of row 0"),
        (MULTI, TWO, [[[1, 1, 1]] * 2] * 2, "the shape [2, 2, 3]; expected [2, 5]"),
        (policy(), TWO, [[1, 1]], "the shape [1, 2]; expected [2, 2]"),
        (policy(Distribution.GAUSSIAN), TWO, [[1, 1]] * 2, "a gaussian policy"),
        (policy(Distribution.BERNOULLI), TWO, [[1, 1]] * 2, "a bernoulli policy"),
    ],
)
def test_masks_that_allow_nothing_or_do_not_fit_are_refused(
    signature: NetSignature, rows: Rows, mask: Any, why: str
) -> None:
    assert signature.policy is not None
    with pytest.raises(InvalidRequestError) as refusal:
        checked_mask(signature, signature.policy, mask, rows, "action_mask")
    assert why in str(refusal.value)
    assert refusal.value.param == "action_mask"


@pytest.mark.parametrize(
    ("signature", "rows", "actions", "dtype"),
    [
        (policy(), TWO, [0, 1], "int64"),
        (recurrent(), TWO_THREE, [[0, 1, 1]] * 2, "int64"),
        (MULTI, TWO, [[1, 2]] * 2, "int64"),
        (policy(Distribution.BERNOULLI, 3), TWO, [[0, 1, 1]] * 2, "int64"),
        (policy(Distribution.GAUSSIAN, 3), TWO, [[0, 9.5, 1]] * 2, "float32"),
        (policy(Distribution.SQUASHED_GAUSSIAN, 1), TWO, [[-1.0], [1.0]], "float32"),
    ],
)
def test_actions_are_judged_as_answers_have_them(
    signature: NetSignature, rows: Rows, actions: Any, dtype: str
) -> None:
    assert signature.policy is not None
    array = checked_actions(signature, signature.policy, actions, rows, "actions")
    assert array is not None
    assert (array.tolist(), array.dtype.name) == (actions, dtype)


@pytest.mark.parametrize(
    ("signature", "actions", "why"),
    [
        (policy(), [0, 2], "beyond the 2"),
        (policy(), [0, -1], "beyond the 2"),
        (policy(), [[0], [1]], "the shape [2, 1]; expected [2]"),
        (policy(), [0.0, 1.0], "float64"),
        (MULTI, [[1, 3]] * 2, "beyond the 2, 3"),
        (policy(Distribution.GAUSSIAN, 1), [[math.nan], [0]], "NaN"),
        (policy(Distribution.SQUASHED_GAUSSIAN, 1), [[1.5], [0]], "beyond -1 and 1"),
        (policy(Distribution.DETERMINISTIC, 1), [[1.5], [0]], "deterministic policy"),
    ],
)
def test_actions_that_no_answer_has_are_refused(
    signature: NetSignature, actions: Any, why: str
) -> None:
    assert signature.policy is not None
    with pytest.raises(InvalidRequestError) as refusal:
        checked_actions(signature, signature.policy, actions, TWO, "actions")
    assert why in str(refusal.value)
    assert refusal.value.param == "actions"
