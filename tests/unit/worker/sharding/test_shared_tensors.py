"""Large tensors of an upload reach all ranks bit by bit, and no rank is left alone in a sum."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import ModelConfig
from mlx_parallm.types.errors import InvalidRequestError, RankLostError
from mlx_parallm.worker.device import shared_tensors
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.shared_tensors import (
    LARGE_BYTES,
    SharedTensor,
    in_groups,
    on_devices,
    on_hosts,
    share_large,
)
from mlx_parallm.worker.weights.loader import load_model
from mlx_parallm.worker.weights.model_weights import ModelWeights
from tests.cluster.sharded_models import DENSE, write_model

#: BITS: numbers whose bits a sum of floats would change.
BITS = np.array([[-0.0, 1e-40, np.nan], [np.inf, 3.0, -2.5]], np.float32)
TENSORS = {
    "float32": HostTensor(BITS),
    "float16": HostTensor(BITS.astype(np.float16)),
    "bfloat16": HostTensor(np.array([[0x8000, 0x7FC1, 1]], np.uint16), is_bfloat16=True),
    "packed": HostTensor(np.array([0xFFFFFFFF, 0, 7], np.uint32)),
    "bytes": HostTensor(np.array([255, 0, 3, 4, 5], np.uint8)),
    "wide": HostTensor(np.tile(BITS.astype(np.float16), (2, 2))[:, :4].copy()),
    "columns": HostTensor(np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))),
}
SHARED: dict[str, HostTensor] = {
    name: SharedTensor(tensor.array, tensor.is_bfloat16) for name, tensor in TENSORS.items()
}


class Recording(Ranks):
    """Rank 0 of two; it keeps the words that it adds."""

    def __init__(self) -> None:
        super().__init__(0, 2, "any", mx.distributed.init())
        object.__setattr__(self, "words", [])

    words: list[mx.array]

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum with zeros of the other rank."""
        self.words.append(x)
        return x


class Replaying(Ranks):
    """Rank 1 of two, which adds its words to those of rank 0."""

    def __init__(self, words: list[mx.array]) -> None:
        super().__init__(1, 2, "any", None)
        object.__setattr__(self, "words", list(words))

    words: list[mx.array]

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum with the words of rank 0."""
        words = self.words.pop(0)
        assert (x.shape, x.dtype) == (words.shape, words.dtype)
        return x + words


class Failing(Ranks):
    """A rank whose sums fail."""

    def sum(self, x: mx.array) -> mx.array:
        """Raise as MLX does."""
        raise RuntimeError("[ring] connection to a peer was lost")


def bits_of(tensor: HostTensor) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bits."""
    return tensor.dtype, tensor.shape, np.ascontiguousarray(tensor.array).tobytes()


@pytest.mark.parametrize("sum_bytes", [0, 79, 80], ids=["alone", "too small", "together"])
def test_every_bit_reaches_other_ranks_and_no_number_is_in_the_message(
    sum_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tensors, "SUM_BYTES", sum_bytes)
    leader = Recording()
    ours = on_devices(SHARED, leader)
    message = pickle.dumps(SHARED)
    assert np.float32(-2.5).tobytes() not in message
    theirs = on_devices(pickle.loads(message), Replaying(leader.words))
    for name, tensor in TENSORS.items():
        assert bits_of(to_host(ours[name])) == bits_of(tensor)
        assert bits_of(to_host(theirs[name])) == bits_of(tensor)
    aligned = [32, 48] if sum_bytes < 80 else [80]
    # Sizes that are no multiple of 16 come alone, each with the word that divides it.
    assert [words.nbytes for words in leader.words] == [*aligned, 24, 12, 6, 12, 5]
    assert {words.dtype for words in leader.words} == {mx.uint32, mx.uint8}
    assert list(ours) == list(theirs) == list(TENSORS)


def test_tensors_that_are_needed_in_host_memory_come_there() -> None:
    leader = Recording()
    mixed = {**SHARED, "small": TENSORS["float32"]}
    ours = on_hosts(mixed, leader)
    theirs = on_hosts(pickle.loads(pickle.dumps(mixed)), Replaying(leader.words))
    for tensors in (ours, theirs):
        assert not any(isinstance(tensor, SharedTensor) for tensor in tensors.values())
        assert [bits_of(tensors[name]) for name in SHARED] == [
            bits_of(tensor) for tensor in TENSORS.values()
        ]
    assert len(leader.words) == len(SHARED) - 1


def test_large_tensors_are_shared() -> None:
    sizes = {"least": 1, "most": LARGE_BYTES, "large": LARGE_BYTES + 1}
    tensors = {
        name: HostTensor(np.broadcast_to(np.zeros((), np.uint8), size))
        for name, size in sizes.items()
    }

    def shared(backend: str) -> list[str]:
        sent = share_large(tensors, backend)
        return [name for name, tensor in sent.items() if isinstance(tensor, SharedTensor)]

    assert shared("ring") == ["large"]
    assert shared("nccl") == ["most", "large"]


def test_groups_are_no_larger_than_asked_or_of_one_tensor() -> None:
    sizes = {"a": 2, "b": 3, "c": 1, "d": 5, "e": 5, "f": 1}
    tensors = {name: HostTensor(np.zeros(size, np.uint8)) for name, size in sizes.items()}

    def groups(most: int | None) -> list[list[str]]:
        return [list(group) for group in in_groups(tensors, most)]

    assert groups(5) == groups(None) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert groups(0) == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]
    assert groups(99) == [list("abcdef")]
    assert list(in_groups({})) == []


def test_a_rank_that_refuses_an_update_takes_part_in_the_other_sums(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", DENSE)
    ranks = Recording()
    weights = ModelWeights(load_model(ModelConfig(), folder, ranks=ranks))
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    tensors = {name: SharedTensor(np.array(array)) for name, array in arrays.items()}
    first = next(iter(tensors))
    tensors[first] = SharedTensor(np.full_like(tensors[first].array, np.nan))
    ranks.words.clear()
    with pytest.raises(InvalidRequestError, match="NaN"):
        weights.read_tensors(tensors)
    # Each tensor has a multiple of 16 bytes, so that a group is one sum.
    sizes = [sum(t.nbytes for t in group.values()) for group in in_groups(tensors)]
    assert [words.nbytes for words in ranks.words] == sizes
    assert len(sizes) > 1


def test_a_rank_that_cannot_take_part_is_lost() -> None:
    with pytest.raises(RankLostError, match=r"Rank 1 cannot share tensors: \[ring\]"):
        on_devices(SHARED, Failing(1, 2, "ring", None))
