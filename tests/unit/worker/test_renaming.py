"""Some weights of a checkpoint become what they are where all are loaded."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.weights.renaming import checkpoint_shapes, renamed_as_in

SHAPES = {"conv.weight": (2, 3), "norm.weight": (2,), "experts.0.up": (3,), "experts.1.up": (3,)}


def rename(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rename as models of mlx_lm do, which look at more than the weight that they rename."""
    shift = 1.0 if arrays["conv.weight"].shape == (2, 3) else 0.0
    experts = [arrays.pop(f"experts.{number}.up") for number in range(2)]
    return {
        "model.conv.weight": arrays["conv.weight"].T,
        "model.norm.weight": arrays["norm.weight"] + shift,
        "model.experts.up": mx.stack(experts),
    }


def test_weights_are_converted_as_beside_all_others() -> None:
    renamed = renamed_as_in(SHAPES, {"norm.weight": mx.array([0.0, 1.0])}, rename)
    assert {name: array.tolist() for name, array in renamed.items()} == {
        "model.norm.weight": [1.0, 2.0]
    }


def test_weights_that_are_kept_as_one_are_sent_together() -> None:
    experts = {name: mx.ones(shape) for name, shape in SHAPES.items() if "experts" in name}
    renamed = renamed_as_in(SHAPES, experts, rename)
    assert renamed["model.experts.up"].tolist() == [[1.0] * 3] * 2
    del experts["experts.1.up"]
    with pytest.raises(InvalidRequestError, match=r"same request: model\.experts\.up"):
        renamed_as_in(SHAPES, experts, rename)


def test_shapes_are_those_of_plain_checkpoints(tmp_path: Path) -> None:
    assert checkpoint_shapes(tmp_path) == {}
    for name in ("first", "second"):
        arrays = {f"{name}.weight": mx.zeros((2, 3), mx.bfloat16)}
        mx.save_safetensors(str(tmp_path / f"model-{name}.safetensors"), arrays)
    assert checkpoint_shapes(tmp_path) == {"first.weight": (2, 3), "second.weight": (2, 3)}
    packed = {"packed.weight": mx.zeros((2, 3), mx.uint32)}
    mx.save_safetensors(str(tmp_path / "model-third.safetensors"), packed)
    assert checkpoint_shapes(tmp_path) == {}
