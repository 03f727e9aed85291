"""Models of GGUF files against the folders that they were made from."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.gguf.files import read_model
from mlx_parallm.models.gguf.folder import gguf_folder
from mlx_parallm.models.gguf.rope import llama3_factors
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.weights.hub import log_download, resolve_model
from mlx_parallm.worker.weights.loader import load_model
from tests.gguf_files import (
    ARCHITECTURES,
    FLOATS,
    HEAD_DIM,
    PACKED,
    RandomModel,
    dequantised,
    random_model,
    tensors_of,
    write_folder,
    write_gguf,
)

IDS = mx.array([[5, 9, 2, 77, 31, 8, 90, 100, 3, 3, 14] * 4])
DTYPES = {Kind.F32: mx.float32, Kind.F16: mx.float16, Kind.BF16: mx.bfloat16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlx_parallm" / "gguf"


def folder_of(path: Path) -> Path:
    return resolve_model(str(path), None, log_download)


def logits(folder: Path, dtype: str = "auto") -> np.ndarray:
    model = load_model(ModelConfig(dtype=dtype), folder).model
    return np.array(model(IDS).astype(mx.float32))


def unpacked(folder: Path, bits: int) -> dict[str, np.ndarray]:
    """Return the weights of a folder, dequantised in float32 by their definition."""
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    whole: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in arrays and name.endswith(".weight"):
            packed = np.array(array)
            shifts = np.arange(0, 32, bits, dtype=np.uint32)
            numbers = (packed[..., None] >> shifts) & ((1 << bits) - 1)
            groups = numbers.reshape(*packed.shape[:-1], -1, 32).astype(np.float32)
            scales, biases = (
                np.array(arrays[f"{stem}.{leaf}"].astype(mx.float32))[..., None]
                for leaf in ("scales", "biases")
            )
            whole[name] = (groups * scales + biases).reshape(*packed.shape[:-1], -1)
        elif not name.endswith(("scales", "biases")):
            whole[name] = np.array(array.astype(mx.float32))
    return whole


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_unpacked_types_have_the_logits_of_the_folder(
    tmp_path: Path, model_type: str, kind: Kind
) -> None:
    model = random_model(model_type)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    folder = write_folder(tmp_path / "folder", model, DTYPES[kind])
    np.testing.assert_array_equal(logits(folder_of(path)), logits(folder))


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_packed_types_keep_their_numbers(tmp_path: Path, model_type: str, kind: Kind) -> None:
    model = random_model(model_type)
    view = folder_of(write_gguf(tmp_path / "model.gguf", model, kind))
    expected = dequantised(model, kind)
    own = unpacked(view, 8 if kind == Kind.Q8_0 else 4)
    assert own.keys() == expected.weights.keys()
    for name, array in expected.weights.items():
        # Vectors are float16 beside quantised layers, whose scales are.
        atol = 0 if array.ndim > 1 else 1e-3
        np.testing.assert_allclose(own[name], array, rtol=0, atol=atol, err_msg=name)
    reference = logits(write_folder(tmp_path / "folder", expected))
    difference = np.abs(logits(view) - reference).max()
    assert difference <= 0.005 * np.abs(reference).max()


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_packed_layers_compute_what_their_numbers_say(tmp_path: Path, kind: Kind) -> None:
    """Compute as a GPU does: without float32 weights."""
    model = random_model("qwen3")
    view = folder_of(write_gguf(tmp_path / "model.gguf", model, kind))
    folder = write_folder(tmp_path / "folder", dequantised(model, kind))
    reference = logits(folder, "float32")
    difference = np.abs(logits(view, "float16") - reference).max()
    assert difference <= 0.02 * np.abs(reference).max()


def test_four_bit_weights_are_not_dequantised(tmp_path: Path) -> None:
    model = random_model("llama")
    view = folder_of(write_gguf(tmp_path / "model.gguf", model, Kind.Q4_0))
    layer = load_model(ModelConfig(dtype="float16"), view).model.layers[0].self_attn.q_proj
    assert (layer.bits, layer.group_size) == (4, 32)
    ratio = (view / "model.safetensors").stat().st_size / sum(
        data.nbytes for data, _ in tensors_of(model, Kind.Q4_0).values()
    )
    assert ratio < 1.25  # a bias for each scale, and the header


def test_files_may_mix_types(tmp_path: Path) -> None:
    """Files that are called Q4_0 have tensors of Q4_1."""
    model = random_model("qwen3")
    kinds = {
        "blk.0.ffn_down.weight": Kind.Q4_1,
        "blk.1.ffn_down.weight": Kind.Q8_0,
        "output.weight": Kind.F16,
        "token_embd.weight": Kind.Q8_0,
    }
    view = folder_of(write_gguf(tmp_path / "model.gguf", model, Kind.Q4_0, kinds=kinds))
    weights = {
        name: dequantised(
            model,
            {
                "model.layers.0.mlp.down_proj.weight": Kind.Q4_1,
                "model.layers.1.mlp.down_proj.weight": Kind.Q8_0,
                "lm_head.weight": Kind.F16,
                "model.embed_tokens.weight": Kind.Q8_0,
            }.get(name, Kind.Q4_0),
        ).weights[name]
        for name in model.weights
    }
    reference = logits(write_folder(tmp_path / "folder", RandomModel(model.config, weights)))
    difference = np.abs(logits(view) - reference).max()
    assert difference <= 0.005 * np.abs(reference).max()


def test_a_tied_head_is_tied(tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=True)
    model.weights.pop("lm_head.weight", None)
    view = folder_of(write_gguf(tmp_path / "model.gguf", model, Kind.F32))
    assert json.loads((view / "config.json").read_text())["tie_word_embeddings"] is True
    np.testing.assert_array_equal(logits(view), logits(write_folder(tmp_path / "f", model)))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_scaling_of_llama_3_comes_back_from_its_factors(tmp_path: Path) -> None:
    """Files have only the factors, as a tensor that is no weight (llama.cpp#8676, #8761)."""
    for factor in (8.0, 32.0):
        scaling = {**LLAMA3, "factor": factor}
        model = random_model("llama", rope_scaling=scaling, rope_theta=500000.0)
        factors = np.array(llama3_factors(scaling, 500000.0, HEAD_DIM), np.float32)
        path = tmp_path / f"{factor}.gguf"
        write_gguf(path, model, Kind.F32, extra={"rope_freqs.weight": factors})
        folder = write_folder(tmp_path / f"{factor}", model)
        np.testing.assert_array_equal(logits(folder_of(path)), logits(folder))


@pytest.mark.parametrize(
    ("model_type", "scaling", "fields"),
    [
        (
            "gemma3_text",
            {"rope_type": "linear", "factor": 8.0},
            {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 8.0},
        ),
        (
            "llama",
            {"rope_type": "linear", "factor": 4.0},
            {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0},
        ),
        ("llama", {"rope_type": "linear", "factor": 4.0}, {"ARCH.rope.scale_linear": 4.0}),
        (
            "qwen2",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {
                "ARCH.rope.scaling.type": "yarn",
                "ARCH.rope.scaling.factor": 4.0,
                "ARCH.rope.scaling.original_context_length": 32,
            },
        ),
    ],
    ids=["gemma3", "linear", "linear, 2023", "yarn"],
)
def test_scaling_of_positions_is_that_of_the_folder(
    tmp_path: Path, model_type: str, scaling: dict[str, Any], fields: dict[str, Any]
) -> None:
    model = random_model(model_type, rope_scaling=scaling)
    path = write_gguf(tmp_path / "model.gguf", model, Kind.F32, fields=fields)
    plain = write_folder(tmp_path / "plain", random_model(model_type))
    own, folder = logits(folder_of(path)), logits(write_folder(tmp_path / "folder", model))
    np.testing.assert_array_equal(own, folder)
    assert not np.array_equal(own, logits(plain))


@pytest.mark.parametrize(
    ("model_type", "num_layers"), [("gemma2", 46), ("gemma2", 45), ("gemma3_text", 62)]
)
def test_the_largest_gemma_scales_queries_by_another_size(
    tmp_path: Path, model_type: str, num_layers: int
) -> None:
    """No key of a file says so; llama.cpp knows these models by their number of layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    model = random_model(model_type, num_hidden_layers=num_layers, **sizes)
    view = folder_of(write_gguf(tmp_path / "model.gguf", model, Kind.F16))
    config = json.loads((view / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == (HEAD_DIM if num_layers == 45 else 32 // 4)


def test_the_first_files_of_gemma_2_lack_keys(tmp_path: Path) -> None:
    model = random_model("gemma2")
    path = write_gguf(tmp_path / "model.gguf", model, Kind.F16)
    data = path.read_bytes()
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"):
        data = data.replace(f"gemma2.{name}".encode(), f"gemma2.{name[:-1]}_".encode())
    path.write_bytes(data)
    config = json.loads((folder_of(path) / "config.json").read_text())
    names = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    assert [config[name] for name in names] == [50, 30, 4096]


def test_scaled_positions_of_gemma_2_are_refused(tmp_path: Path) -> None:
    fields = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.0}
    path = write_gguf(tmp_path / "model.gguf", random_model("gemma2"), Kind.F16, fields=fields)
    with pytest.raises(ModelLoadError, match="not scaled"):
        folder_of(path)


def test_a_split_model_is_named_by_its_first_part(tmp_path: Path) -> None:
    model = random_model("gemma2")
    write_gguf(tmp_path / "model.gguf", model, Kind.F16, max_tensors=9)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 4
    folder = write_folder(tmp_path / "folder", model, mx.float16)
    np.testing.assert_array_equal(logits(folder_of(parts[0])), logits(folder))
    with pytest.raises(ModelLoadError, match=f"name the first part, {parts[0].name}"):
        folder_of(parts[2])
    parts[2].rename(tmp_path / "elsewhere")
    parts[3].unlink()
    with pytest.raises(ModelLoadError, match=f"lacks {parts[2].name}, {parts[3].name}"):
        folder_of(parts[0])


def test_parts_must_be_what_they_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model("qwen3"), Kind.F16, max_tensors=12)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    contents = [part.read_bytes() for part in parts]
    for number, other in [(1, 0), (1, 2), (0, 1)]:
        parts[number].write_bytes(contents[other])
        with pytest.raises(ModelLoadError):
            folder_of(parts[0])
        parts[number].write_bytes(contents[number])
    folder_of(parts[0])
    lone = tmp_path / "lone.gguf"
    lone.write_bytes(contents[0])
    with pytest.raises(ModelLoadError, match="part 0 of"):
        folder_of(lone)


def test_a_folder_of_files_names_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model("qwen3"), Kind.F16)
    with pytest.raises(ModelLoadError, match=r"such as .*/model\.gguf"):
        folder_of(tmp_path)
    folder = write_folder(tmp_path, random_model("qwen3"))
    assert folder_of(tmp_path) == folder


def test_a_folder_is_written_once_and_again_after_a_change(tmp_path: Path, cache: Path) -> None:
    shares: list[float] = []
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.F16)
    first = gguf_folder(path, lambda _, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert gguf_folder(path, lambda *_: shares.append(2)) == first
    assert shares[-1] == 1
    write_gguf(path, random_model("llama", seed=1), Kind.F16)
    second = folder_of(path)
    assert second != first
    # Folders of files that changed, and those that were never finished, are removed.
    assert sorted(each for each in cache.iterdir() if each.is_dir()) == [second]
    (cache / "part-of-a-killed-process").mkdir()
    other = folder_of(write_gguf(tmp_path / "other.gguf", random_model("qwen2"), Kind.F16))
    assert sorted(each for each in cache.iterdir() if each.is_dir()) == sorted([second, other])


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.F16)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ModelLoadError, match="1,000 are free"):
        folder_of(path)
    assert not [each for each in cache.iterdir() if each.is_dir()]


UNSERVED = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q5_0, Kind.IQ4_NL]


@pytest.mark.parametrize("kind", UNSERVED, ids=lambda kind: kind.name)
def test_other_types_are_refused_with_what_converts_them(tmp_path: Path, kind: Kind) -> None:
    """Files that are called Q4_0 mostly have a head of Q6_K (rknn-llm#100)."""
    model = random_model("llama", hidden_size=256, head_dim=64)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    head = np.zeros((model.config["vocab_size"], 256 // size * num_bytes), np.uint8)
    replaced = {"output.weight": (head, kind)}
    path = write_gguf(tmp_path / "model.gguf", model, Kind.Q4_0, replaced=replaced)
    with pytest.raises(ModelLoadError) as error:
        folder_of(path)
    assert f"output.weight is of the type {kind.name}" in str(error.value)
    assert f"mlx_parallm models convert {path} --mlx-path FOLDER" in str(error.value)


def broken(path: Path, **change: Any) -> Path:
    """Write a file whose metadata or tensors are changed."""
    model = random_model("llama")
    for name in change.get("without", ()):
        model.weights.pop(name)
    fields = change.get("fields")
    return write_gguf(path, model, Kind.F16, fields=fields, extra=change.get("extra"))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a missing tensor": (
        {"without": ["model.layers.1.mlp.up_proj.weight"]},
        "lacks the tensor blk.1.ffn_up.weight",
    ),
    "no embeddings": ({"without": ["model.embed_tokens.weight"]}, "token_embd.weight"),
    "an unknown tensor": (
        {"extra": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)}},
        "blk.0.ffn_gate_inp.weight",
    ),
    "a tensor of a layer too many": (
        {"extra": {"blk.3.ffn_up.weight": np.zeros((4, 4), np.float32)}},
        "blk.3.ffn_up.weight",
    ),
    "experts": ({"fields": {"ARCH.expert_count": 8}}, "experts"),
    "factors of nobody": (
        {"extra": {"rope_freqs.weight": np.full(8, 3, np.float32)}},
        "not those of Llama 3",
    ),
    "part of a head that rotates": (
        {"fields": {"ARCH.rope.dimension_count": 8}},
        "rope.dimension_count",
    ),
    "LongRoPE": (
        {"fields": {"ARCH.rope.scaling.type": "longrope", "ARCH.rope.scaling.factor": 2.0}},
        "rope.scaling.type",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_no_model_are_refused(tmp_path: Path, cache: Path, case: str) -> None:
    change, words = BROKEN[case]
    with pytest.raises(ModelLoadError) as error:
        folder_of(broken(tmp_path / "model.gguf", **change))
    assert words in str(error.value)
    assert not cache.exists() or not any(cache.iterdir())


@pytest.mark.parametrize(
    "architecture",
    ["qwen3moe", "clip", "bert", "gemma4", "\x1b[2J", "", pytest.param("a" * 10**7, id="10 MB")],
)
def test_other_architectures_are_refused(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    name = architecture.encode()
    key = b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(head + struct.pack("<IQ", 8, len(name)) + name)
    with pytest.raises(ModelLoadError, match="architecture") as error:
        folder_of(path)
    assert repr(architecture[:80]) in str(error.value)
    assert len(str(error.value)) < 1000


def patched(path: Path, key: str, value: bytes) -> None:
    """Change the bytes of a number in the metadata of a file."""
    data = bytearray(path.read_bytes())
    place = data.index(key.encode()) + len(key) + 4
    data[place : place + len(value)] = value
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 1 << 31),
        ("llama.block_count", (1 << 32) - 1),
        ("llama.embedding_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 1 << 31),
        ("llama.attention.key_length", 1),
        ("llama.context_length", 0),
        ("llama.feed_forward_length", 7),
    ],
)
def test_sizes_that_fit_no_tensor_are_refused(tmp_path: Path, key: str, number: int) -> None:
    """Layers beyond a reader's limit were written beyond its arrays (llama.cpp#25821)."""
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.F16)
    patched(path, key, struct.pack("<I", number))
    with pytest.raises(ModelLoadError):
        folder_of(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("key", ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, key: str, number: float) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.F16)
    patched(path, key, struct.pack("<f", number))
    with pytest.raises(ModelLoadError, match=key):
        folder_of(path)


def test_infinite_scales_are_refused_when_weights_are_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.Q8_0)
    data = path.read_bytes()
    path.write_bytes(data[:-34] + struct.pack("<e", 60000.0) + data[-32:])
    with pytest.raises(ModelLoadError):
        logits(folder_of(path))


@pytest.fixture(scope="module")
def packed_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("packed")
    return write_gguf(folder / "model.gguf", random_model("gemma3_text"), Kind.Q8_0).read_bytes()


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_header_is_a_model_or_refused(
    data: st.DataObject, packed_bytes: bytes, tmp_path: Path
) -> None:
    end = packed_bytes.rindex(b"blk.2.") + 100
    changed = bytearray(packed_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(24, end))
        piece = data.draw(st.binary(max_size=9))
        taken = data.draw(st.sampled_from([0, len(piece)]))
        changed[place : place + taken] = piece
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(changed))
    with contextlib.suppress(ModelLoadError):
        read_model(path)


def test_one_part_of_one_is_a_whole_model(tmp_path: Path) -> None:
    model = random_model("qwen3")
    path = write_gguf(tmp_path / "model-00001-of-00001.gguf", model, Kind.F32)
    np.testing.assert_array_equal(
        logits(folder_of(path)), logits(write_folder(tmp_path / "folder", model))
    )
    for name in ("model-00000-of-00001.gguf", "model-00002-of-00001.gguf"):
        with pytest.raises(ModelLoadError, match="does not exist"):
            folder_of(path.rename(tmp_path / name))
        (tmp_path / name).rename(path)


def test_merges_that_are_none_are_refused_when_the_tokenizer_is_loaded(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.F16)
    path.write_bytes(path.read_bytes().replace(b"t h", b"t  "))
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(folder_of(path))
