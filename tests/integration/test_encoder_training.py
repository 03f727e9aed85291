"""Perturbed forwards of encoders against ordinary adapters, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import Distribution, Segment
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.pooling.encoder_adapters import EncoderAdapters
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.training.directions import Copies, Directions
from mlx_parallm.worker.training.frozen_prefix import FrozenPrefix
from mlx_parallm.worker.training.pair_forwards import PairForwards
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.trainable import TrainableAdapter, TrainedLayer
from tests.encoder_folders import golden_names, read_golden, write_golden

RANK, SCALE, EPSILON = 2, 2.0, 0.05
#: ``FAMILIES``: a masked LM of each architecture.
FAMILIES = [name for name in golden_names() if name.endswith("_masked_lm")]
TEXTS = ((5, 6, 7, 8), (9, 8), (5, 6, 7, 8, 9, 10, 11), (4,), (12, 3, 12))


def linear_paths(runner: EncoderRunner, layer: int) -> list[str]:
    """Return the paths of the linear layers of one of the model's layers."""
    module = runner.adapters.layers[layer]
    prefix = next(path for path, other in runner.adapters.modules.items() if other is module)
    modules = runner.adapters.modules.items()
    return [path for path, other in modules if path.startswith(f"{prefix}.") and is_linear(other)]


def is_linear(module: object) -> bool:
    return "Linear" in type(module).__name__


def pair_forwards(
    model: EncoderAdapters, trainable: TrainableAdapter, pool: PrefixPool | None
) -> PairForwards:
    return PairForwards(model, trainable, FrozenPrefix(model, trainable.layers, pool))


class Trained:
    """A golden encoder, an adapter of its last layer (or of all), and perturbed copies."""

    def __init__(self, folder: Path, name: str, *, layers: str, trains_first: bool) -> None:
        golden = read_golden(name)
        self.runner = EncoderRunner(load_encoder(write_golden(folder, golden)), VectorSpec())
        self.task = "mlm" if "mlm" in self.runner.info.tasks else "embed"
        count = len(self.runner.adapters.layers)
        chosen = range(count) if layers == "all" else [count - 1]
        shared = self.runner.adapters.shared
        paths = [path for layer in chosen for path in linear_paths(self.runner, layer)]
        paths = [path for path in paths if path not in shared]
        trained = [self._layer(path) for path in paths]
        key = mx.random.key(3)
        first = {
            layer.path: 0.2 * mx.random.normal([RANK, layer.num_inputs], key=key)
            for layer in trained
        }
        self.trainable = TrainableAdapter(trained, first, scale=SCALE, trains_first=trains_first)

    def _layer(self, path: str) -> TrainedLayer:
        module = self.runner.adapters.modules[path]
        outputs, inputs = module["weight"].shape
        return TrainedLayer(path=path, num_inputs=inputs, num_outputs=outputs, rank=RANK)

    def inputs(self, texts: Sequence[tuple[int, ...]] = TEXTS) -> list[PoolingInput]:
        if self.task == "embed":
            return [PoolingInput(text) for text in texts]
        return [
            PoolingInput(text, "mlm", places=(len(text) - 1,), candidates=(3, 9)) for text in texts
        ]

    def copies(self, *signs: int, epsilon: float = EPSILON) -> Copies:
        directions = Directions(5, 1, self.trainable.num_parameters, Distribution.RADEMACHER)
        segments = [Segment(0, sign, ()) for sign in signs or (1, -1)]
        return Copies(self.trainable.theta, directions, segments, epsilon)

    def paired(self, pool: PrefixPool | None, inputs: Sequence[PoolingInput]) -> list[np.ndarray]:
        """Return the results of both copies, all in one forward."""
        forwards = pair_forwards(self.runner.adapters, self.trainable, pool)
        everything = range(len(inputs))
        return forwards.begin(inputs, [everything, everything], self.copies()).wait().results

    def served(self, copy: mx.array, inputs: Sequence[PoolingInput]) -> list[np.ndarray]:
        """Return the results with one copy as an ordinary adapter in a slot."""
        adapter = self.trainable.weights(copy)
        store = AdapterStore(self.runner.adapters)
        store.add(adapter.digest, adapter)
        store.place({1: adapter.digest})
        named = [
            PoolingInput(
                item.token_ids,
                item.task,
                places=item.places,
                candidates=item.candidates,
                adapter=adapter.digest,
            )
            for item in inputs
        ]
        results = self.runner.begin(named, {adapter.digest: 1}).wait()
        store.release()
        return results


@pytest.mark.parametrize(
    ("name", "layers", "trains_first"),
    [
        *((name, "last", False) for name in FAMILIES),
        *((name, "all", False) for name in FAMILIES[:4]),
        *(("bert_masked_lm", layers, True) for layers in ("last", "all")),
        ("bert_sequence", "last", False),
        ("bert_token", "last", False),
    ],
)
def test_pairs_are_what_two_adapters_give(
    tmp_path: Path, name: str, layers: str, trains_first: bool
) -> None:
    trained = Trained(tmp_path, name, layers=layers, trains_first=trains_first)
    inputs = trained.inputs()
    base = trained.runner.run(inputs)
    pool = PrefixPool(1 << 20)
    first = trained.paired(pool, inputs)
    plus, minus = (trained.served(copy, inputs) for copy in trained.copies().value())
    for result, expected in zip(first, [*plus, *minus], strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-5, rtol=1e-5)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(plus, minus, strict=True))
    # What is found in the pool has the same bits as what was computed for it.
    for again, result in zip(trained.paired(pool, inputs), first, strict=True):
        np.testing.assert_array_equal(again, result)
    for naive, result in zip(trained.paired(None, inputs), first, strict=True):
        np.testing.assert_allclose(naive, result, atol=1e-5, rtol=1e-5)
    # The model itself is as it was.
    for after, before in zip(trained.runner.run(inputs), base, strict=True):
        np.testing.assert_array_equal(after, before)


def test_layers_whose_result_texts_share_are_refused(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "deberta_v2", layers="last", trains_first=False)
    paths = linear_paths(trained.runner, 0)
    shared = min(path for path in paths if path in trained.runner.adapters.shared)
    layer = trained._layer(shared)
    first = {shared: mx.zeros([RANK, layer.num_inputs])}
    trainable = TrainableAdapter([layer], first, scale=SCALE, trains_first=False)
    with pytest.raises(InvalidRequestError, match="cannot be trained"):
        pair_forwards(trained.runner.adapters, trainable, None)


def test_a_text_that_is_found_is_not_computed_again(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "bert", layers="last", trains_first=False)
    pool = PrefixPool(1 << 20)
    for count in (2, 4, 5):
        trained.paired(pool, trained.inputs(TEXTS[:count]))
    assert (pool.counts.lookups, pool.counts.hits) == (11, 6)


def test_a_pool_without_room_changes_no_bit(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "bert", layers="last", trains_first=False)
    inputs = trained.inputs()
    kept = trained.paired(PrefixPool(1 << 20), inputs)
    for result, expected in zip(trained.paired(PrefixPool(64), inputs), kept, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_copies_without_a_perturbation_give_the_same(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "bert", layers="all", trains_first=False)
    forwards = pair_forwards(trained.runner.adapters, trained.trainable, None)
    inputs = trained.inputs()
    everything = range(len(inputs))
    job = forwards.begin(inputs, [everything, everything], trained.copies(epsilon=0.0))
    results = job.wait().results
    for plus, minus in zip(results[: len(inputs)], results[len(inputs) :], strict=True):
        np.testing.assert_allclose(plus, minus, atol=1e-6, rtol=0)


def test_segments_may_have_inputs_of_their_own(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "bert", layers="last", trains_first=False)
    forwards = pair_forwards(trained.runner.adapters, trained.trainable, PrefixPool(1 << 20))
    inputs = trained.inputs(TEXTS[:4])
    plus, minus = trained.copies().value()
    copies = trained.copies(1, -1, -1)
    results = forwards.begin(inputs, [[0, 1], [0, 1], [3, 2]], copies).wait().results
    expected = [
        *trained.served(plus, inputs[:2]),
        *trained.served(minus, inputs[:2]),
        *trained.served(minus, [inputs[3], inputs[2]]),
    ]
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, atol=1e-5, rtol=1e-5)


def test_a_pool_that_is_emptied_between_two_stages_changes_no_result(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "bert", layers="last", trains_first=False)
    pool = PrefixPool(1 << 20)
    forwards = pair_forwards(trained.runner.adapters, trained.trainable, pool)
    inputs, everything = trained.inputs(TEXTS[:4]), [range(4), range(4)]
    expected = forwards.begin(inputs[:2], [range(2)] * 2, trained.copies()).wait().results
    job = forwards.begin(inputs, everything, trained.copies())
    assert job.num_stages > 2
    job.advance()
    # The device failed, so that what is kept may be of work that was lost.
    pool.clear()
    results = job.wait().results
    for result, wanted in zip([*results[:2], *results[4:6]], expected, strict=True):
        np.testing.assert_allclose(result, wanted, atol=1e-5, rtol=1e-5)
