"""The check of tiles: whatever depends on a row's place is seen, in outputs, states and acts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.types.nets import ActResult
from mlx_parallm.worker.nets import tiles
from mlx_parallm.worker.nets.tiles import TILES, find_tiles
from tests.nets import policy, recurrent

Arrays = dict[str, mx.array]


ROWS = 16


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHECKED_ROWS", ROWS)
    monkeypatch.setattr(tiles, "TRIALS", 3)


def results(batch: dict[str, Any]) -> tuple[Arrays, Arrays]:
    """Return results of a policy with two choices that depend on nothing but the row."""
    x = batch["inputs"]["obs"].sum(-1)
    act = batch.get("act")
    if act is None:
        return {"logits": x}, batch.get("states", {})
    drawn = mx.where(act["is_deterministic"][:, None], 0, act["seeds"][:, :1] % 2)
    actions = drawn[..., 0] if x.ndim == 1 else drawn
    logits = mx.zeros((*x.shape, 2))
    outputs = {
        ActResult.ACTIONS: actions,
        ActResult.LOG_PROBS: x,
        f"{ActResult.DIST}.logits": logits,
    }
    return outputs, batch.get("states", {})


def places(like: mx.array) -> mx.array:
    return mx.arange(len(like)).reshape(-1, *[1] * (like.ndim - 1))


#: ``FAULTS``: of a batch, whether rows depend on their places, by where that is.
FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "outputs": lambda batch: "act" not in batch,
    "states": lambda batch: "states" in batch,
    "starts": lambda batch: batch["starts"].squeeze() if "starts" in batch else False,
    "drawn": lambda batch: ~batch["act"]["is_deterministic"] if "act" in batch else False,
    "likeliest": lambda batch: batch["act"]["is_deterministic"] if "act" in batch else False,
    "judged": lambda batch: batch.get("act", {}).get("is_judged", False),
    "masked": lambda batch: "action_mask" in batch.get("act", {}),
}


def test_rows_that_depend_on_nothing_else_are_computed_together() -> None:
    for signature in (policy(), recurrent()):
        assert find_tiles(signature, results) == (TILES[0], ROWS)


@pytest.mark.parametrize("place", FAULTS)
def test_any_number_that_depends_on_its_place_is_seen(place: str) -> None:
    def compute(batch: dict[str, Any]) -> tuple[Arrays, Arrays]:
        outputs, states = results(batch)
        name = "logits" if "logits" in outputs else ActResult.LOG_PROBS
        number = outputs[name]
        is_wrong = mx.array(FAULTS[place](batch))
        is_wrong = is_wrong.reshape(-1, *[1] * (number.ndim - 1)) if is_wrong.ndim else is_wrong
        outputs[name] = mx.where(is_wrong, number + places(number), number)
        return outputs, states

    assert find_tiles(recurrent(), compute) == (1, 1)


def test_states_of_acts_are_compared() -> None:
    def compute(batch: dict[str, Any]) -> tuple[Arrays, Arrays]:
        outputs, states = results(batch)
        is_act = "act" in batch
        states = {name: state + is_act * places(state) for name, state in states.items()}
        return outputs, states

    assert find_tiles(recurrent(), compute) == (1, 1)
