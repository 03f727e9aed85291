"""The index decides which files hold a model's weights, for every reader."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.adapters.formats import is_adapter_folder
from mlx_parallm.config import ModelConfig
from mlx_parallm.models import indexed_weights
from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.checkpoints.decoders import DecoderPlan
from mlx_parallm.models.checkpoints.weight_files import INDEX, WHOLE, weight_files
from mlx_parallm.models.decoder_classes import decoder_classes
from mlx_parallm.models.indexed_weights import read_weights
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.worker.lora.checkpoint_changes import CheckpointChanges
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.weights.loader import load_model, load_parameters, parameters_of
from mlx_parallm.worker.weights.model_weights import ModelWeights
from mlx_parallm.worker.weights.renaming import checkpoint_shapes
from mlx_parallm.worker.weights.revision import folder_revision
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.decoder_folders import read_decoder
from tests.encoder_folders import golden_arrays, read_golden

CONFIG = ModelConfig(dtype="float32")
#: ``NAMES``: names of two files that an index may have.
NAMES = (
    ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    ("pytorch_model-00001.safetensors", "trunk.safetensors"),
)
WRONG = ("model.fp16.safetensors", "model-00003-of-00003.safetensors", "model-old.safetensors")


def read(folder: Path, kind: str) -> dict[str, Any]:
    """Return a model's parameters by one of the readers."""
    if kind == "encoder":
        model = load_encoder(folder).model
    elif kind == "pooling decoder":
        model = open_decoder(CONFIG, folder, DecoderPlan()).model
    elif kind == "update":
        return load_parameters(CONFIG, folder, is_cast=False)
    else:
        model = load_model(CONFIG, folder).model
    arrays: Any = tree_flatten(model.parameters())
    return dict(arrays)


def golden_of(kind: str) -> dict[str, Any]:
    if kind == "encoder":
        return read_golden("bert")
    return read_decoder("qwen3_model" if kind == "pooling decoder" else "llama_chosen")


def write(
    folder: Path, kind: str, files: tuple[str, ...], others: tuple[str, ...] = (WHOLE, *WRONG)
) -> Path:
    """Write a model in files, beside files whose weights are all 9."""
    folder.mkdir()
    golden = golden_of(kind)
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    weights = golden_arrays(golden)
    for name in others:
        mx.save_safetensors(
            str(folder / name), {key: mx.full(a.shape, 9.0) for key, a in weights.items()}
        )
    keys = sorted(weights)
    placed = {key: files[number % len(files)] for number, key in enumerate(keys)}
    for name in files:
        part = {key: weights[key] for key in keys if placed[key] == name}
        mx.save_safetensors(str(folder / name), part, {"format": "pt"})
    if files != (WHOLE,):
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


KINDS = ("decoder", "encoder", "pooling decoder", "update")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("files", [*NAMES, (WHOLE,)])
def test_other_files_are_not_read(kind: str, files: tuple[str, ...], tmp_path: Path) -> None:
    expected = read(write(tmp_path / "plain", kind, (WHOLE,), ()), kind)
    others = tuple(name for name in (WHOLE, *WRONG) if name not in files)
    folder = write(tmp_path / "crowded", kind, files, others)
    read_back = read(folder, kind)
    assert read_back.keys() == expected.keys()
    assert all(mx.array_equal(read_back[key], expected[key]) for key in expected)
    shapes = {key: array.shape for key, array in golden_arrays(golden_of(kind)).items()}
    assert checkpoint_shapes(folder) == shapes
    assert {file.name for file in weight_files(folder)} == set(files)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_the_index_does_not_name_for_a_file_are_not_read(
    kind: str, tmp_path: Path
) -> None:
    """Read a checkpoint with an overlay, whose base has other weights of the same names."""
    expected = read(write(tmp_path / "plain", kind, (WHOLE,), ()), kind)
    folder = write(tmp_path / "overlaid", kind, NAMES[1], ())
    for name in NAMES[1]:
        own: Any = mx.load(str(folder / name))
        stale = {key: mx.full(a.shape, 9.0) for key, a in golden_arrays(golden_of(kind)).items()}
        others = {"model.unknown.weight": mx.zeros((2,))}
        mx.save_safetensors(str(folder / name), stale | others | own, {"format": "pt"})
    read_back = read(folder, kind)
    assert read_back.keys() == expected.keys()
    assert all(mx.array_equal(read_back[key], expected[key]) for key in expected)


def test_an_overlaid_model_takes_updates(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "decoder", NAMES[1], ())
    file = folder / NAMES[1][0]
    own: Any = mx.load(str(file))
    mx.save_safetensors(str(file), own | {"model.unknown.weight": mx.zeros((2,))})
    loaded = load_model(CONFIG, folder)
    new = mx.ones((32,))
    read_back = ModelWeights(loaded).read_tensors({"model.norm.weight": to_host(new)})
    assert mx.array_equal(read_back["model.norm.weight"], new)


def write_overlaid(folder: Path, name: str, **changed: Any) -> Path:
    """Write an architecture's tiny model, and a tensor that the index does not name."""
    config = {**config_of(name), **changed}
    weights = parameters_of(build(config))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, WHOLE)}))
    mx.save_safetensors(str(folder / WHOLE), weights | {"unknown.weight": mx.zeros((2,))})
    return folder


@pytest.mark.parametrize("name", ["falcon_h1", "llama", "gemma3"])
def test_an_overlaid_model_converts_later_weights_as_any_other(name: str, tmp_path: Path) -> None:
    """Adapters and updates call ``sanitize`` with weights of their own."""
    model = load_model(CONFIG, write_overlaid(tmp_path, name)).model
    assert type(model) is decoder_classes(config_of(name))[0]
    assert "sanitize" not in vars(model)


def test_adapters_of_an_overlaid_model_are_scaled_as_its_weights(tmp_path: Path) -> None:
    path = "model.layers.0.self_attn.k_proj"
    loaded = load_model(CONFIG, write_overlaid(tmp_path, "falcon_h1", attention_in_multiplier=0.5))
    changes = CheckpointChanges(loaded.model, loaded.config)
    weight = mx.random.normal((4, 3))
    assert mx.array_equal(changes.weight(path, weight), 0.5 * weight)


def test_nothing_keeps_the_weights_that_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[Weights]] = []

    class Read(dict[str, mx.array]):
        """Weights that can be watched."""

    def read_watched(folder: Path) -> Weights:
        weights = Read(read_weights(folder))
        kept.append(weakref.ref(weights))
        return weights

    monkeypatch.setattr(indexed_weights, "read_weights", read_watched)
    model = load_model(CONFIG, write_overlaid(tmp_path, "llama")).model
    gc.collect()
    assert kept
    assert [each() for each in kept] == [None]
    assert model is not None


def test_an_update_from_a_folder_reads_its_index(tmp_path: Path) -> None:
    loaded = load_model(CONFIG, write(tmp_path / "old", "decoder", (WHOLE,), ()))
    weights = ModelWeights(loaded)
    new = write(tmp_path / "new", "decoder", NAMES[1])
    fitting = weights.read_folder(new)
    assert not any(mx.any(array == 9.0).item() for array in fitting.values())
    (new / NAMES[1][1]).unlink()
    with pytest.raises(InvalidRequestError, match=r"lacks trunk\.safetensors"):
        weights.read_folder(new)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[", "could not be read"),
        ("[]", "weight_map"),
        ('{"weight_map": {"a": 1}}', "not the name of a file"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not the name of a file"),
        ('{"weight_map": {"a": "/etc/model.safetensors"}}', "not the name of a file"),
        ('{"weight_map": {"a": "model.bin"}}', "not a safetensors file"),
        ('{"weight_map": {"a": "x.safetensors"}}', "none of the files"),
    ],
)
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_wrong_index_is_refused(kind: str, index: str, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", kind, (WHOLE,), ())
    (folder / WHOLE).unlink()
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelLoadError, match=message):
        read(folder, kind)


def test_an_index_of_another_checkpoint_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "model", "decoder", (WHOLE,), ())
    (folder / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert weight_files(folder) == [folder / WHOLE]
    assert INDEX in caplog.text


def test_shards_without_an_index_are_all_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "decoder", NAMES[0], ())
    (folder / INDEX).unlink()
    assert [file.name for file in weight_files(folder)] == list(NAMES[0])


def test_a_digest_is_of_the_files_that_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "decoder", NAMES[1], ())
    before = folder_revision(folder)
    (folder / "model.fp16.safetensors").write_bytes(b"left over")
    assert folder_revision(folder) == before
    file = folder / NAMES[1][1]
    file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
    assert folder_revision(folder) != before


def test_a_folder_with_an_index_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert is_adapter_folder(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    assert not is_adapter_folder(tmp_path)
