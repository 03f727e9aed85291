"""Requests that become one batch, and their parts of its results."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_parallm.nets.batch import join, key_of, split
from mlx_parallm.types.nets import ANY, ActParams, NetRequest, NetSignature, TensorSpec
from mlx_parallm.worker.ops import NetOutputs

PLAIN = NetSignature(
    inputs=(TensorSpec("obs", "float32", (ANY, 3)), TensorSpec("goal", "int64", (ANY,))),
    outputs=(TensorSpec("logits", "float32", (ANY, 2)),),
)
TIMED = NetSignature(
    inputs=(TensorSpec("obs", "float32", (ANY, ANY, 3)),),
    outputs=(TensorSpec("y", "float32", (ANY, ANY, 2)), TensorSpec("last", "float32", (ANY, 2))),
    states=(TensorSpec("lstm.h", "float32", (ANY, 1, 4)),),
)


def plain(rows: int, act: ActParams | None = None) -> NetRequest:
    inputs = {
        "obs": np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32),
        "goal": np.arange(rows),
    }
    return NetRequest(request_id=str(rows), model="n", inputs=inputs, num_rows=rows, act=act)


def timed(rows: int, times: int | None, start: np.ndarray | None = None) -> NetRequest:
    shape = (rows, 3) if times is None else (rows, times, 3)
    array = np.random.default_rng(rows).normal(size=shape).astype(np.float32)
    return NetRequest(
        request_id=str(rows), model="n", inputs={"obs": array}, num_rows=rows, episode_start=start
    )


def test_rows_are_joined_and_split_in_order() -> None:
    requests = [plain(2), plain(1), plain(4)]
    batch = join("n", PLAIN, requests, [None] * 3)
    assert batch.states is None
    assert batch.act is None
    assert batch.episode_start is None
    outputs = NetOutputs(outputs={"logits": batch.inputs["obs"][:, :2]}, states={})
    for request, part in zip(requests, split(PLAIN, requests, outputs), strict=True):
        np.testing.assert_array_equal(part.outputs["logits"], request.inputs["obs"][:, :2])
        assert batch.inputs["goal"].dtype == np.int64


def test_times_decide_who_joins() -> None:
    spec = TIMED.timed_input
    assert key_of(spec, timed(1, None)) == key_of(spec, timed(2, 1)) == (1, False)
    assert key_of(spec, timed(1, 5)) == (5, False)
    assert key_of(PLAIN.timed_input, plain(1)) == (None, False)
    assert key_of(None, plain(1, ActParams())) == (None, True)


def test_a_request_without_time_is_answered_without() -> None:
    requests = [timed(2, None), timed(3, 1)]
    states = {"lstm.h": np.ones((2, 1, 4), np.float32)}
    batch = join("n", TIMED, requests, [states, None])
    assert batch.inputs["obs"].shape == (5, 1, 3)
    assert batch.states is not None
    np.testing.assert_array_equal(batch.states["lstm.h"].sum(axis=(1, 2)), [4, 4, 0, 0, 0])
    results = NetOutputs(
        outputs={"y": np.zeros((5, 1, 2)), "last": np.zeros((5, 2))},
        states={"lstm.h": np.arange(5.0)[:, None, None]},
    )
    without, with_time = split(TIMED, requests, results)
    assert [each.shape for each in without.outputs.values()] == [(2, 2), (2, 2)]
    assert [each.shape for each in with_time.outputs.values()] == [(3, 1, 2), (3, 2)]
    np.testing.assert_array_equal(with_time.states["lstm.h"].ravel(), [2, 3, 4])


@pytest.mark.parametrize("times", [1, 3])
def test_episodes_start_where_requests_say(times: int) -> None:
    starts_at = np.zeros((2, times), bool)
    starts_at[1, -1] = True
    requests = [timed(2, times, starts_at), timed(1, times), timed(1, times, np.array([True]))]
    starts = join("n", TIMED, requests, [None] * 3).episode_start
    assert starts is not None
    assert starts.shape == (4, times)
    expected = np.zeros((4, times), bool)
    expected[1, -1] = expected[3, 0] = True
    np.testing.assert_array_equal(starts, expected)


def test_acts_keep_their_own_settings() -> None:
    mask = np.array([[True, False]])
    requests = [
        plain(2, ActParams(seed=1 << 40 | 5)),
        plain(1, ActParams(is_deterministic=True, action_mask=mask)),
        plain(1, ActParams(actions=np.array([1]))),
    ]
    act = join("n", PLAIN, requests, [None] * 3).act
    assert act is not None
    assert act.action_mask is not None
    assert act.actions is not None
    assert act.is_judged is not None
    np.testing.assert_array_equal(act.seeds, [[5, 0], [5, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(act.is_deterministic, [False, False, True, False])
    np.testing.assert_array_equal(act.action_mask, [[True, True]] * 2 + [[True, False]] + [[1, 1]])
    np.testing.assert_array_equal(act.actions, [0, 0, 0, 1])
    np.testing.assert_array_equal(act.is_judged, [False, False, False, True])
