"""Recurrent layers over time, whose states begin anew where episodes do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from mlx_parallm.models.nets.dense import Lstm, Recurrent
from mlx_parallm.worker.nets.products import product

#: ``States``: arrays ``[rows, hidden]`` by the last part of their names.
States = dict[str, mx.array]


def run_recurrent(
    layer: Recurrent,
    parts: Mapping[str, mx.array],
    x: mx.array,
    states: Mapping[str, mx.array | None],
    episode_start: mx.array | None,
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return the hidden states of all times, and the states after the last one.

    Args:
        layer: its sizes.
        parts: its weights.
        x: ``[rows, time, features]``, or ``[rows, features]`` for one time.
        states: ``[rows, layers, hidden]`` before the first time; None for zeros.
        episode_start: bool ``[rows, time]``, or ``[rows]`` for one time; None: nowhere.
    """
    if x.ndim == 2:
        starts = None if episode_start is None else episode_start.reshape(-1, 1)
        hidden, after = run_recurrent(layer, parts, x[:, None], states, starts)
        return hidden[:, 0], after
    step = _lstm_step if isinstance(layer, Lstm) else _gru_step
    ends: list[States] = []
    for place in range(layer.num_layers):
        weights = {
            name: parts[f"{name}_l{place}"]
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            if f"{name}_l{place}" in parts
        }
        state = _first_state(layer, states, place, x)
        x, end = _over_time(step, weights, x, state, episode_start)
        ends.append(end)
    after = {name: mx.stack([end[name] for end in ends], axis=1) for name in states}
    return x, after


def _first_state(
    layer: Recurrent, states: Mapping[str, mx.array | None], place: int, x: mx.array
) -> States:
    zeros = mx.zeros((len(x), layer.hidden_size), mx.float32)
    return {name: zeros if state is None else state[:, place] for name, state in states.items()}


def _over_time(
    step: Callable[[Mapping[str, mx.array], mx.array, States], States],
    weights: Mapping[str, mx.array],
    x: mx.array,
    state: States,
    episode_start: mx.array | None,
) -> tuple[mx.array, States]:
    read = product(x, weights["weight_ih"].T)
    if "bias_ih" in weights:
        read = read + weights["bias_ih"]
    hidden: list[mx.array] = []
    for time in range(x.shape[1]):
        if episode_start is not None:
            # A choice, not a product: what is forgotten may be infinite.
            begins = episode_start[:, time, None]
            state = {name: mx.where(begins, 0.0, array) for name, array in state.items()}
        state = step(weights, read[:, time], state)
        hidden.append(state["h"])
    return mx.stack(hidden, axis=1), state


def _gates(weights: Mapping[str, mx.array], hidden: mx.array) -> mx.array:
    result = product(hidden, weights["weight_hh"].T)
    return result + weights["bias_hh"] if "bias_hh" in weights else result


def _lstm_step(weights: Mapping[str, mx.array], read: mx.array, state: States) -> States:
    i, f, g, o = mx.split(read + _gates(weights, state["h"]), 4, axis=-1)
    cell = mx.sigmoid(f) * state["c"] + mx.sigmoid(i) * mx.tanh(g)
    return {"h": mx.sigmoid(o) * mx.tanh(cell), "c": cell}


def _gru_step(weights: Mapping[str, mx.array], read: mx.array, state: States) -> States:
    reset, update, new = mx.split(read, 3, axis=-1)
    own_reset, own_update, own_new = mx.split(_gates(weights, state["h"]), 3, axis=-1)
    candidate = mx.tanh(new + mx.sigmoid(reset + own_reset) * own_new)
    share = mx.sigmoid(update + own_update)
    return {"h": (1 - share) * candidate + share * state["h"]}
