"""Joins the rows of requests into one batch, and gives each request its part of the results.

Where a net's tensors have time, those of a batch have it too; a request may leave it out, which
means one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from mlx_parallm.types.nets import ActParams, Arrays, NetRequest, NetSignature, TensorSpec
from mlx_parallm.worker.ops import ActRows, NetBatch, NetOutputs

#: ``BatchKey``: requests with equal keys can be one batch: their number of times (None if the net
#: has no time), and whether they act.
BatchKey = tuple[int | None, bool]


def key_of(timed: TensorSpec | None, request: NetRequest) -> BatchKey:
    """Return which requests can be in a batch with this one.

    Args:
        timed: an input of the net with time; None if it has none.
        request: of the net.
    """
    times = None
    if timed is not None:
        times = request.inputs[timed.name].shape[1] if _has_time(timed, request) else 1
    return times, request.act is not None


def _has_time(timed: TensorSpec, request: NetRequest) -> bool:
    """Return True if a request's tensors have a dimension of time."""
    return request.inputs[timed.name].ndim == len(timed.shape)


def join(
    model: str,
    signature: NetSignature,
    requests: Sequence[NetRequest],
    states: Sequence[Arrays | None],
) -> NetBatch:
    """Return the batch of requests with equal keys.

    Args:
        model: the net.
        signature: its tensors.
        requests: at least one.
        states: those that they begin with; None for zeros.
    """
    times, is_act = key_of(signature.timed_input, requests[0])
    inputs = {
        spec.name: _joined([_timed(spec, request.inputs[spec.name]) for request in requests])
        for spec in signature.inputs
    }
    act = _act_rows(requests, times) if is_act else None
    return NetBatch(
        model=model,
        inputs=inputs,
        states=_joined_states(signature.states, requests, states),
        episode_start=_episode_starts(requests, times) if signature.states else None,
        act=act,
    )


def split(
    signature: NetSignature, requests: Sequence[NetRequest], results: NetOutputs
) -> list[NetOutputs]:
    """Return each request's part of a batch's results."""
    timed = signature.timed_input
    timed_outputs = {spec.name for spec in signature.outputs if spec.has_time}
    parts: list[NetOutputs] = []
    end = 0
    for request in requests:
        begin, end = end, end + request.num_rows
        own = {name: array[begin:end] for name, array in results.outputs.items()}
        if timed is not None and not _has_time(timed, request):
            # All that a policy answers has time if its inputs have.
            shed = own if request.act is not None else timed_outputs
            own = {name: array[:, 0] if name in shed else array for name, array in own.items()}
        after = {name: array[begin:end] for name, array in results.states.items()}
        parts.append(NetOutputs(outputs=own, states=after))
    return parts


def _timed(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Return an input with time, if the net's has it."""
    return array[:, None] if spec.has_time and array.ndim < len(spec.shape) else array


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined_states(
    specs: Iterable[TensorSpec],
    requests: Sequence[NetRequest],
    states: Sequence[Arrays | None],
) -> Mapping[str, np.ndarray] | None:
    if all(state is None for state in states):
        return None

    def own(spec: TensorSpec, request: NetRequest, state: Arrays | None) -> np.ndarray:
        if state is None:
            return np.zeros((request.num_rows, *spec.shape[1:]), spec.dtype)
        return state[spec.name]

    pairs = list(zip(requests, states, strict=True))
    return {spec.name: _joined([own(spec, *pair) for pair in pairs]) for spec in specs}


def _episode_starts(requests: Sequence[NetRequest], times: int | None) -> np.ndarray | None:
    if all(request.episode_start is None for request in requests):
        return None
    rows = sum(request.num_rows for request in requests)
    starts = np.zeros((rows, times or 1), bool)
    begin = 0
    for request in requests:
        end = begin + request.num_rows
        own = request.episode_start
        if own is not None:
            # Without time it is about the first one.
            starts[begin:end, : 1 if own.ndim == 1 else None] = own.reshape(len(own), -1)
        begin = end
    return starts if times is not None else starts[:, 0]


def _act_rows(requests: Sequence[NetRequest], times: int | None) -> ActRows:
    acts = [request.act or ActParams() for request in requests]
    counts = [request.num_rows for request in requests]
    seeds = np.empty((sum(counts), 2), np.uint32)
    seeds[:, 0] = np.repeat(np.array([act.seed & 0xFFFFFFFF for act in acts], np.uint32), counts)
    # The row's number in its own request.
    seeds[:, 1] = _joined([np.arange(count) for count in counts])
    mask = _optional(
        [act.action_mask for act in acts], counts, times, lambda shape, dtype: np.ones(shape, dtype)
    )
    actions = [act.actions for act in acts]
    return ActRows(
        seeds=seeds,
        is_deterministic=np.repeat([act.is_deterministic for act in acts], counts),
        action_mask=mask,
        actions=_optional(actions, counts, times, lambda shape, dtype: np.zeros(shape, dtype)),
        is_judged=None
        if all(each is None for each in actions)
        else np.repeat([each is not None for each in actions], counts),
    )


def _optional(
    arrays: Sequence[np.ndarray | None],
    counts: Sequence[int],
    times: int | None,
    fill: Callable[[tuple[int, ...], np.dtype], np.ndarray],
) -> np.ndarray | None:
    """Return arrays of rows that only some requests have, with ``fill`` for the others."""
    first = next((each for each in arrays if each is not None), None)
    if first is None:
        return None
    sizes, dtype = first.shape[1:], first.dtype
    if times is not None:
        # A request that leaves time out has a dimension less than those of others with one time.
        most = max(each.ndim for each in arrays if each is not None)
        with_time = next(each for each in arrays if each is not None and each.ndim == most)
        sizes = with_time.shape[1:]
    parts = [
        fill((count, *sizes), dtype) if each is None else each.reshape(count, *sizes)
        for each, count in zip(arrays, counts, strict=True)
    ]
    return _joined(parts)
