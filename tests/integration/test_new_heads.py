"""New heads of one label: every family of encoders, and decoders that are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.adapters.writing import adapter_files
from mlx_parallm.models.checkpoints.encoders import ENCODER_TYPES
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.gradients import LossKind, LossSpec, LossTarget, OptimiserSettings
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training_ops import ApplyGradient
from tests.encoder_folders import golden_names, read_golden, write_golden
from tests.golden_adapters import read_golden_adapter
from tests.gradient_sessions import POOL_BYTES, GradientSession, Rows
from tests.integration.test_encoder_adapters import runner_of

slow = pytest.mark.slow
NAMES: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "module_names.json").read_text(encoding="utf-8")
)
#: ``FAMILIES``: by model type, the name of a golden model's family.
FAMILIES = {model_type: model_type.replace("-", "_") for model_type in ENCODER_TYPES}
#: ``HEADS``: the layers of a new head on a masked LM, in checkpoints of transformers.
OF_ROBERTA = {"classifier.dense", "classifier.out_proj"}
#: ``SAVED_WHOLE``: modules of which PEFT refuses parts in ``modules_to_save``.
SAVED_WHOLE = ("classifier", "score")
HEADS: Mapping[str, set[str]] = {
    "bert": {"bert.pooler.dense", "classifier"},
    "deberta-v2": {"pooler.dense", "classifier"},
    "distilbert": {"pre_classifier", "classifier"},
    "electra": OF_ROBERTA,
    "gte": {"gte.pooler.dense", "classifier"},
    # A masked LM has the layers before the classifier already.
    "modernbert": {"classifier"},
    "mpnet": OF_ROBERTA,
    "new": {"new.pooler.dense", "classifier"},
    "nomic_bert": {"nomic_bert.pooler.dense", "classifier"},
    "roberta": OF_ROBERTA,
    "xlm-roberta": OF_ROBERTA,
}
QUICK = ("bert_masked_lm", "modernbert", "nomic_bert_masked_lm", "roberta_token")
#: ``BASES``: golden models without a score of texts.
BASES = [
    pytest.param(name, marks=() if name in QUICK else slow)
    for family in sorted(FAMILIES.values())
    for name in (f"{family}_masked_lm", family, f"{family}_token", f"{family}_sequence")
    if name in golden_names()
]
TEXTS = ((5, 6, 7, 8), (9, 8, 4), (5, 6, 7, 8, 9, 10), (4, 11, 12, 3))
INPUTS = [PoolingInput(text, "classify") for text in TEXTS]
PAIRS: Rows = (INPUTS, [LossTarget(), LossTarget(margin=0.1)])
LOSS = LossSpec(kind=LossKind.PAIRWISE)
SPEC: dict[str, Any] = {"rank": 2, "alpha": 4.0, "top": 1, "makes_head": True}


def encoder(folder: Path, name: str) -> AdaptedEncoder:
    return EncoderRunner(load_encoder(write_golden(folder, read_golden(name))), VectorSpec())


def opened(
    runner: AdaptedEncoder, samples: Sequence[PoolingInput] = INPUTS[:2], **changes: Any
) -> GradientSession:
    pool = PrefixPool(POOL_BYTES)
    return GradientSession(runner.adapters, samples, pool=pool, **(SPEC | changes))


def numbered(path: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", path)


def targets_of(runner: AdaptedEncoder) -> dict[str, Any]:
    """Return the targets of a model some of whose layers PEFT cannot change."""
    target = {"gte": "o_proj", "nomic_bert": "out_proj"}.get(runner.info.architecture)
    return {} if target is None else {"targets": (target,)}


def margins(session: GradientSession) -> np.ndarray:
    session.session.gradients.drop()
    return session.forward(LOSS, PAIRS).facts["margins"]


def train(session: GradientSession, steps: int = 30) -> None:
    for number in range(steps):
        session.forward(LOSS, PAIRS)
        op = ApplyGradient(
            model="model",
            session="session",
            settings=OptimiserSettings(),
            learning_rate=0.02,
            number=number + 1,
        )
        session.session.gradients.apply(op)


def trained_weights(session: GradientSession) -> AdapterWeights:
    return session.session.weights(session.theta, None)


def scores(runner: AdaptedEncoder, adapter: AdapterWeights) -> np.ndarray:
    """Serve an adapter; return the score of each text."""
    store = AdapterStore(runner.adapters)
    own = store.add(adapter.digest, adapter)
    assert own is not None
    assert (own.num_labels, own.tasks[0]) == (1, "classify")
    store.place({1: adapter.digest})
    inputs = [PoolingInput(text, "classify", adapter=adapter.digest) for text in TEXTS]
    results = runner.begin(inputs, {adapter.digest: 1}).wait()
    store.release()
    return np.stack(results)[:, 0]


def written(runner: AdaptedEncoder, adapter: AdapterWeights) -> tuple[dict[str, Any], Any]:
    """Return the config and the tensors of an adapter's files."""
    files = adapter_files(runner.adapters.of_checkpoint(adapter), "peft")
    tensors = read_safetensors(files["adapter_model.safetensors"], param="file")
    return json.loads(files["adapter_config.json"]), tensors


def saved_layers(config: dict[str, Any], tensors: Mapping[str, Any]) -> set[str]:
    """Return the layers of a head; check that the config names them, and nothing else."""
    read = read_adapter(config, tensors, param="file")
    layers = {name.rpartition(".")[0] for name in read.saved}
    wholes = {path.partition(".")[0] for path in layers}
    named = {path for path in layers if path.partition(".")[0] not in SAVED_WHOLE}
    assert set(config["modules_to_save"]) == named | (wholes & set(SAVED_WHOLE))
    return layers


def test_every_family_is_tried() -> None:
    tried = {str(each.values[0]) for each in BASES}
    assert HEADS.keys() == ENCODER_TYPES
    for family in FAMILIES.values():
        assert tried & {family, f"{family}_masked_lm"}, family


@pytest.mark.parametrize("name", BASES)
def test_a_new_head_learns_pairs_and_is_served(tmp_path: Path, name: str) -> None:
    runner = encoder(tmp_path, name)
    before = [runner.run([PoolingInput(text)])[0] for text in TEXTS]
    session = opened(runner, **targets_of(runner))
    assert session.session.prefix.pool is not None
    assert any(session.error(LOSS, PAIRS, step) < 0.01 for step in (1e-3, 1e-4))
    train(session)
    ahead = margins(session)
    assert np.all(ahead > 1)
    adapter = trained_weights(session)
    served = scores(runner, adapter)
    np.testing.assert_allclose(served[::2] - served[1::2], ahead, atol=1e-4)
    config, tensors = written(runner, adapter)
    read = runner.adapters.of_model(read_adapter(config, tensors, param="file"), param="file")
    np.testing.assert_array_equal(scores(runner, read), served)
    # The model itself is as it was.
    for text, vector in zip(TEXTS, before, strict=True):
        np.testing.assert_array_equal(runner.run([PoolingInput(text)])[0], vector)


@pytest.mark.parametrize("model_type", sorted(ENCODER_TYPES))
def test_layers_have_the_names_of_transformers(tmp_path: Path, model_type: str) -> None:
    family = FAMILIES[model_type]
    for name in {family, f"{family}_masked_lm"} & set(golden_names()):
        runner = encoder(tmp_path / name, name)
        session = opened(runner, **targets_of(runner))
        config, tensors = written(runner, trained_weights(session))
        layers = saved_layers(config, tensors)
        if name != family:
            assert layers == HEADS[model_type]
        assert config["task_type"] == "SEQ_CLS"
        for classes in NAMES.get(model_type, {}).items():
            if classes[0].endswith("ForSequenceClassification"):
                named = {numbered(path) for path in config["target_modules"]}
                # The list has linear layers alone.
                assert (layers | named) - {"head.norm"} <= set(classes[1])


@pytest.mark.parametrize(
    "name", [name for name in golden_names() if name.endswith(("_sequence", "_token"))]
)
def test_files_name_the_layers_of_every_familys_head(tmp_path: Path, name: str) -> None:
    runner = encoder(tmp_path, name)
    spec = {"makes_head": False, "trains_head": True}
    session = opened(runner, samples=(), **targets_of(runner), **spec)
    config, tensors = written(runner, trained_weights(session))
    layers = saved_layers(config, tensors)
    assert all(path.partition(".")[0].endswith("classifier") for path in layers)
    # PEFT saves each module whose path ends so, and misses its tensors where there are none.
    for of, paths in NAMES.get(runner.info.architecture, {}).items():
        if of.endswith("ForSequenceClassification") and name.endswith("_sequence"):
            assert {
                path for path in paths if path.endswith(tuple(config["modules_to_save"]))
            } <= layers


def test_a_head_is_drawn_from_the_seed_as_transformers_draws_it(tmp_path: Path) -> None:
    runner = encoder(tmp_path, "bert_masked_lm")

    def drawn(seed: int) -> dict[str, np.ndarray]:
        head = runner.adapters.new_head(seed)
        assert head is not None
        return {name: np.array(array) for name, array in head.parameters.items()}

    first, again, other = drawn(0), drawn(0), drawn(1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
        if name.endswith("bias"):
            assert not array.any()
        else:
            assert not np.array_equal(array, other[name])
            assert array.std() == pytest.approx(0.02, rel=0.3)


def test_weights_of_modernbert_are_cut_off(tmp_path: Path) -> None:
    loaded = load_encoder(write_golden(tmp_path, read_golden("modernbert")))
    head = EncoderRunner(loaded, VectorSpec()).adapters.new_head(0)
    assert head is not None
    args = loaded.model.args
    limits = {
        "classifier.weight": args.hidden_size**-0.5,
        "head.dense.weight": 0.02 / (2 * args.num_hidden_layers) ** 0.5,
    }
    for name, deviation in limits.items():
        drawn = np.abs(np.array(head.parameters[name]))
        assert deviation < drawn.max() <= 2 * deviation
    assert np.all(np.array(head.parameters["head.norm.weight"]) == 1)


def is_packable(path: str, module: nn.Module) -> bool:
    del path
    return isinstance(module, nn.Linear) and module.weight.shape[1] % 32 == 0


def test_packed_encoders_take_a_new_head(tmp_path: Path) -> None:
    loaded = load_encoder(write_golden(tmp_path, read_golden("bert_token")))
    nn.quantize(loaded.model, group_size=32, bits=8, class_predicate=is_packable)
    runner = EncoderRunner(loaded, VectorSpec())
    session = opened(runner)
    train(session)
    served = scores(runner, trained_weights(session))
    assert np.all(served[::2] > served[1::2])


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("qwen3_features", {}),
        ("qwen3_token", {}),
        ("llama_sequence", {"makes_head": False, "trains_head": True}),
    ],
)
def test_scores_of_decoders_learn_pairs(tmp_path: Path, name: str, spec: dict[str, Any]) -> None:
    runner = runner_of(tmp_path, read_golden_adapter(name))
    session = opened(runner, **spec)
    assert session.session.trainable.paths[-1] == "score"
    train(session)
    ahead = margins(session)
    assert np.all(ahead > 1)
    adapter = trained_weights(session)
    served = scores(runner, adapter)
    np.testing.assert_allclose(served[::2] - served[1::2], ahead, atol=1e-4)
    config, tensors = written(runner, adapter)
    assert config["modules_to_save"] == ["score"]
    assert all(path.startswith("model.layers.") for path in config["target_modules"])
    read = runner.adapters.of_model(read_adapter(config, tensors, param="file"), param="file")
    np.testing.assert_array_equal(scores(runner, read), served)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_models_with_a_score_are_refused(tmp_path: Path, kind: str) -> None:
    golden = read_golden("bert_sequence")
    golden["config"] |= {"id2label": {"0": "LABEL_0"}}
    golden["weights"] |= {"classifier.weight": [1, 32], "classifier.bias": [1]}
    runner: AdaptedEncoder
    if kind == "encoder":
        runner = EncoderRunner(load_encoder(write_golden(tmp_path, golden)), VectorSpec())
    else:
        runner = runner_of(tmp_path, read_golden_adapter("llama_sequence"))
    with pytest.raises(InvalidRequestError) as caught:
        opened(runner)
    assert caught.value.param == "trainable.head"
