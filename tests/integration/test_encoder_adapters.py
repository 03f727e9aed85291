"""Adapters of encoders, and of decoders as pooling models, against PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, Kind, LowRank
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.model_task import decoder_plan, decoder_task
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput, Task
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.pooling.decoder_runner import DecoderRunner
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from tests.encoder_folders import golden_arrays, write_encoder, write_golden
from tests.golden_adapters import adapter_names, golden_tensors, read_base, read_golden_adapter

ATOL = 1e-4
ALONE = 1e-5


@pytest.fixture(params=adapter_names())
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_golden_adapter(request.param)


class Served:
    """A golden adapter's model with adapters in slots."""

    def __init__(self, folder: Path, golden: dict[str, Any], *adapters: AdapterWeights) -> None:
        self.runner = runner_of(folder, golden)
        self.store = AdapterStore(self.runner.adapters)
        self.heads = [self.store.add(adapter.digest, adapter) for adapter in adapters]
        self.slots = {adapter.digest: slot for slot, adapter in enumerate(adapters, 1)}
        self.store.place({slot: content for content, slot in self.slots.items()})

    def run(self, *inputs: PoolingInput) -> list[np.ndarray]:
        return self.runner.begin(inputs, self.slots).wait()


def runner_of(
    folder: Path, golden: dict[str, Any], arrays: dict[str, mx.array] | None = None
) -> AdaptedEncoder:
    """Return a runner of a golden adapter's model, with ``arrays`` as weights if they are given."""
    base = read_base(golden)
    path = write_encoder(folder, base["config"], arrays or golden_arrays(base))
    spec = VectorSpec(poolings=("last",))
    if golden["base"].startswith("encoders"):
        return EncoderRunner(load_encoder(path), spec)
    plan = decoder_plan(decoder_task(base["config"], ()), base["config"])
    if "Model" in base["config"]["architectures"][0]:
        plan = decoder_plan("embed", base["config"])
    return DecoderRunner(open_decoder(ModelConfig(), path, plan), plan, spec)


def adapter_of(golden: dict[str, Any], *, scale: float = 1.0) -> AdapterWeights:
    tensors = golden_tensors(golden, scale=scale)
    hosts = {name: HostTensor(array) for name, array in tensors.items()}
    return read_adapter(golden["adapter_config"], hosts, param="adapter")


def task_of(golden: dict[str, Any]) -> Task:
    tasks: dict[str, Task] = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify"}
    return tasks.get(golden["adapter_config"]["task_type"], "token_embed")


def inputs_of(golden: dict[str, Any], *adapters: AdapterWeights | None) -> list[PoolingInput]:
    """Return every text with each adapter in turn; None is the base model."""
    task = task_of(golden)
    return [
        PoolingInput(tuple(ids), task, adapter=None if adapter is None else adapter.digest)
        for ids in golden["input_ids"]
        for adapter in adapters
    ]


def test_results_are_those_of_peft(golden: dict[str, Any], tmp_path: Path) -> None:
    adapter = adapter_of(golden)
    served = Served(tmp_path, golden, adapter)
    actual = served.run(*inputs_of(golden, adapter))
    wanted = golden.get("logits") or golden["last_hidden_state"]
    for result, expected in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(result, np.array(expected), atol=ATOL)


def test_rows_of_a_batch_are_those_of_each_alone(golden: dict[str, Any], tmp_path: Path) -> None:
    adapter, other = adapter_of(golden), adapter_of(golden, scale=-0.5)
    # A model without label tasks has them only with an adapter.
    plain = [] if served_alone(golden) else [None]
    served = Served(tmp_path, golden, adapter, other)
    inputs = inputs_of(golden, adapter, *plain, other)
    together = served.run(*inputs)
    alone = [served.run(item)[0] for item in inputs]
    base = runner_of(tmp_path / "base", golden)
    for item, actual, expected in zip(inputs, together, alone, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=ALONE, atol=ALONE)
        if item.adapter is None:
            np.testing.assert_allclose(actual, base.run([item])[0], rtol=ALONE, atol=ALONE)
    # Results of different adapters differ, so the comparisons mean something.
    assert all(np.abs(result - together[0]).max() > 1e-3 for result in together[1 : 2 + len(plain)])


def served_alone(golden: dict[str, Any]) -> bool:
    return task_of(golden) not in base_tasks(golden)


def base_tasks(golden: dict[str, Any]) -> set[Task]:
    ending = read_base(golden)["config"]["architectures"][0]
    tasks: set[Task] = {"embed", "token_embed"}
    if "SequenceClassification" in ending:
        tasks.add("classify")
    if "TokenClassification" in ending:
        tasks.add("token_classify")
    return tasks


@pytest.mark.parametrize(
    "name", [adapter_name for adapter_name in adapter_names() if "new_head" not in adapter_name]
)
def test_results_are_those_of_weights_merged_by_hand(name: str, tmp_path: Path) -> None:
    golden = read_golden_adapter(name)
    adapter = adapter_of(golden)
    actual = Served(tmp_path / "served", golden, adapter).run(*inputs_of(golden, adapter))
    arrays = merged(golden_arrays(read_base(golden)), adapter)
    alone = runner_of(tmp_path / "merged", golden, arrays)
    expected = alone.run([replace(item, adapter=None) for item in inputs_of(golden, adapter)])
    for result, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(result, other, rtol=ALONE, atol=ALONE)


def merged(arrays: dict[str, mx.array], adapter: AdapterWeights) -> dict[str, mx.array]:
    """Return a checkpoint's weights with an adapter's changes and modules."""

    def full_name(name: str) -> str:
        return next(full for full in arrays if full == name or full.endswith(f".{name}"))

    made = dict(arrays)
    for path, change in adapter.modules.items():
        name = full_name(f"{path}.weight")
        weight = arrays[name] + change.scale * (to_mlx(change.b) @ to_mlx(change.a))
        if change.magnitude is not None:
            norm = mx.linalg.norm(weight, axis=1, keepdims=True)
            weight = to_mlx(change.magnitude)[:, None] * weight / norm
        made[name] = weight
    return made | {full_name(name): to_mlx(tensor) for name, tensor in adapter.saved.items()}


def test_a_batch_goes_on_with_the_adapters_that_it_began_with(
    golden: dict[str, Any], tmp_path: Path
) -> None:
    adapter, other = adapter_of(golden), adapter_of(golden, scale=-0.5)
    served = Served(tmp_path, golden, adapter)
    expected = served.run(*inputs_of(golden, adapter))
    job = served.runner.begin(inputs_of(golden, adapter), served.slots)
    job.advance()
    served.store.add(other.digest, other)
    served.store.place({1: other.digest})
    replaced = served.runner.begin(inputs_of(golden, other), {other.digest: 1}).wait()
    for result, before, after in zip(job.wait(), expected, replaced, strict=True):
        np.testing.assert_allclose(result, before, rtol=ALONE, atol=ALONE)
        assert np.abs(result - after).max() > 1e-3


def test_nothing_of_an_adapter_is_left_where_it_was(golden: dict[str, Any], tmp_path: Path) -> None:
    adapter, other = adapter_of(golden), adapter_of(golden, scale=-0.5)
    served = Served(tmp_path / "one", golden, adapter)
    served.store.add(other.digest, other)
    served.store.place({1: other.digest})
    served.slots = {other.digest: 1}
    fresh = Served(tmp_path / "two", golden, other)
    pairs = zip(
        served.run(*inputs_of(golden, other)), fresh.run(*inputs_of(golden, other)), strict=True
    )
    for result, expected in pairs:
        np.testing.assert_array_equal(result, expected)
    served.store.release()
    assert served.store.num_bytes == 0
    embed = [PoolingInput(tuple(ids), "token_embed") for ids in golden["input_ids"]]
    base = runner_of(tmp_path / "base", golden)
    for result, expected in zip(served.run(*embed), base.run(embed), strict=True):
        np.testing.assert_array_equal(result, expected)


def saved(*names: str, shape: tuple[int, ...] = (3, 32)) -> dict[str, HostTensor]:
    return {name: HostTensor(np.zeros(shape, np.float32)) for name in names}


@pytest.mark.parametrize(
    ("base", "changes", "reason"),
    [
        (
            "bert_sequence",
            {"saved": saved("bert.encoder.layer.0.output.dense.weight")},
            "bert.encoder.layer.0.output.dense has tensors of the shapes",
        ),
        (
            "bert_sequence",
            {"saved": saved("bert.embeddings.word_embeddings.weight", shape=(99, 32))},
            "word_embeddings comes before it",
        ),
        ("bert_sequence", {"saved": saved("classifier.weight")}, "not {.*bias"),
        ("bert_sequence", {"saved": saved("classifier.weight", shape=(3, 31))}, "32"),
        ("bert_sequence", {"saved": saved("nothing.weight")}, "no module 'nothing'"),
        ("bert_masked_lm", {}, "needs bert.pooler.dense"),
        ("llama_sequence", {"saved": saved("lm_head.weight")}, "lm_head.weight is none of them"),
        ("llama_sequence", {"saved": saved("score.weight", shape=(3, 7))}, "cannot be run"),
        ("llama_sequence", {"saved": saved("score.weight", shape=(3,))}, "not a tensor of"),
        ("llama_sequence", {"saved": saved("score.scales")}, "not a tensor of"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    base: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    golden = read_golden_adapter("llama_sequence" if "llama" in base else "bert_sequence")
    if base == "bert_masked_lm":
        golden["base"] = f"encoders/{base}"
    adapter = adapter_of(golden)
    served = Served(tmp_path, golden)
    with pytest.raises(InvalidRequestError, match=reason):
        served.store.add("changed", replace(adapter, **changes))
    assert served.store.num_bytes == 0


def test_a_layer_is_not_changed_and_brought_in_full(tmp_path: Path) -> None:
    golden = read_golden_adapter("bert_sequence")
    adapter = adapter_of(golden)
    change = adapter.modules["bert.encoder.layer.0.attention.self.query"]
    small = replace(change, b=HostTensor(np.zeros((3, 4), np.float32)))
    both = replace(adapter, modules={**adapter.modules, "classifier": small})
    with pytest.raises(InvalidRequestError, match="both changes classifier"):
        Served(tmp_path, golden, both)


def test_a_masked_lm_takes_candidates_from_what_an_adapter_makes_of_its_tables(
    tmp_path: Path,
) -> None:
    golden = {**read_golden_adapter("bert_sequence"), "base": "encoders/bert_untied"}
    modules = {
        "bert.embeddings.word_embeddings": low_rank("embedding", (99, 32)),
        "cls.predictions.transform.dense": low_rank("linear", (32, 32)),
        "cls.predictions.decoder": low_rank("linear", (99, 32)),
    }
    adapter = AdapterWeights(modules)
    served = Served(tmp_path, golden, adapter)
    ids = tuple(golden["input_ids"][0])
    whole = PoolingInput(ids, "mlm", places=(2, 4), adapter=adapter.digest)
    chosen = replace(whole, candidates=(7, 50, 8))
    (of_all,), (of_some,) = served.run(whole), served.run(chosen)
    np.testing.assert_allclose(of_some, of_all[:, [7, 50, 8]], rtol=ALONE, atol=ALONE)
    (plain,) = served.run(replace(chosen, adapter=None))
    assert np.abs(plain - of_some).max() > 1e-2


def low_rank(kind: Kind, shape: tuple[int, int]) -> LowRank:
    outer, inner = shape if kind == "linear" else shape[::-1]
    random = np.random.default_rng(outer + inner)
    a, b = (
        HostTensor(random.normal(0, 0.3, size).astype(np.float32))
        for size in ((4, inner), (outer, 4))
    )
    return LowRank(kind=kind, a=a, b=b, scale=1.0, changes_head=kind == "linear")


def test_a_quantised_encoder_takes_adapters_and_their_heads(tmp_path: Path) -> None:
    golden = read_golden_adapter("bert_sequence")
    base, adapter = read_base(golden), adapter_of(golden)
    model = load_encoder(write_encoder(tmp_path / "whole", base["config"], golden_arrays(base)))
    nn.quantize(
        model.model,
        group_size=32,
        bits=8,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m["weight"].shape[-1] % 32 == 0,
    )
    packed: Any = dict(tree_flatten(model.model.parameters()))
    config = {**base["config"], "quantization": {"group_size": 32, "bits": 8}}
    runner = EncoderRunner(
        load_encoder(write_encoder(tmp_path / "packed", config, packed)), VectorSpec()
    )
    store = AdapterStore(runner.adapters)
    store.add(adapter.digest, adapter)
    store.place({1: adapter.digest})
    actual = runner.begin(inputs_of(golden, adapter), {adapter.digest: 1}).wait()
    # Dequantise the packed weights.
    whole = dict(packed)
    for name in [name for name in packed if name.endswith(".scales")]:
        path = name.removesuffix(".scales")
        parts = [whole.pop(f"{path}.{part}") for part in ("weight", "scales", "biases")]
        whole[f"{path}.weight"] = mx.dequantize(*parts, group_size=32, bits=8)
    expected = runner_of(tmp_path / "merged", golden, merged(whole, adapter)).run(
        [replace(item, adapter=None) for item in inputs_of(golden, adapter)]
    )
    for result, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-4, atol=1e-4)


def test_the_layers_of_the_models_own_head_are_changed_for_their_rows(tmp_path: Path) -> None:
    golden = read_golden_adapter("bert_sequence")
    changes = {
        "bert.pooler.dense": low_rank("linear", (32, 32)),
        "classifier": low_rank("linear", (3, 32)),
    }
    of_head, other = AdapterWeights(changes), adapter_of(golden)
    served = Served(tmp_path / "served", golden, of_head, other)
    assert served.heads[0] is None
    inputs = inputs_of(golden, of_head, None, other)
    together = served.run(*inputs)
    arrays = merged(golden_arrays(read_base(golden)), of_head)
    by_hand = runner_of(tmp_path / "merged", golden, arrays)
    base = runner_of(tmp_path / "base", golden)
    for place in range(0, len(inputs), 3):
        plain = inputs[place + 1]
        np.testing.assert_allclose(together[place], by_hand.run([plain])[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(together[place + 1], base.run([plain])[0], rtol=1e-5, atol=1e-5)
        assert np.abs(together[place] - together[place + 1]).max() > 1e-2


def test_what_belongs_to_no_input_is_changed_in_a_forward_of_its_own(tmp_path: Path) -> None:
    golden = read_golden_adapter("mpnet_sequence")
    path = "mpnet.encoder.relative_attention_bias"
    table = dict(load_encoder_of(tmp_path, golden).named_modules())[path].weight
    shared = AdapterWeights({path: low_rank("embedding", table.shape)})
    other = adapter_of(golden)
    served = Served(tmp_path / "served", golden, shared, other)
    inputs = inputs_of(golden, None, shared, other)
    together = served.run(*inputs)
    arrays = golden_arrays(read_base(golden))
    change = shared.modules[path]
    arrays[f"{path}.weight"] += (to_mlx(change.b) @ to_mlx(change.a)).T
    by_hand = runner_of(tmp_path / "merged", golden, arrays)
    for item, actual in zip(inputs, together, strict=True):
        expected = by_hand.run([replace(item, adapter=None)])[0]
        if item.adapter != shared.digest:
            assert np.abs(actual - expected).max() > 1e-3
            (expected,) = served.run(item)
        np.testing.assert_allclose(actual, expected, rtol=ALONE, atol=ALONE)


def load_encoder_of(folder: Path, golden: dict[str, Any]) -> Any:
    return load_encoder(write_golden(folder, read_base(golden))).model


def test_generators_keep_their_layers() -> None:
    adapter = adapter_of(read_golden_adapter("llama_sequence"))
    layers = AdaptedLayers(nn.Module(), mx.float32, AdapterContext())
    with pytest.raises(InvalidRequestError, match=r"modules_to_save \(score.weight\)"):
        layers.check(adapter, param="adapter")
