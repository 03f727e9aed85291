"""Conversion of GGUF files whose types MLX lacks."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlx_parallm.cli.main import main
from mlx_parallm.cli.models.convert import GGUF_BITS
from mlx_parallm.cli.models.gguf_convert import main as convert_main
from mlx_parallm.models.gguf.convert import BITS, CHOICES, convert, pack, quantised
from mlx_parallm.models.gguf.convert import dequantised as unpacked
from mlx_parallm.models.gguf.files import SERVED
from mlx_parallm.models.gguf.tensor_types import TYPES
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from tests.gguf_files import RandomModel, dequantised, random_model, write_folder, write_gguf
from tests.integration.test_gguf_models import logits

#: ``CHANGED``: tensors that get a type, and their names in folders.
CHANGED = {
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.2.ffn_gate.weight": "model.layers.2.mlp.gate_proj.weight",
}
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
#: ``HALVES``: where blocks have their float16 numbers, in bytes; the package reads these types and
#: writes few of them.
HALVES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
#: ``WORST``: relative errors; groups of 32 whose numbers are evenly spaced lose float16's rounding.
WORST = {
    **dict.fromkeys([Kind.Q4_K, Kind.Q5_K, Kind.Q5_0, Kind.Q5_1], 1e-3),
    Kind.Q6_K: 0.006,
    Kind.Q3_K: 0.1,
    Kind.Q2_K: 0.1,
    Kind.IQ4_NL: 0.04,
    Kind.IQ4_XS: 0.04,
}


def random_blocks(kind: Kind, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Return rows of random blocks of a type."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // size, num_bytes), np.uint8)
    for place in HALVES[kind]:
        scale = np.full((len(blocks), 1), 0.01, "<f2")
        blocks[:, place : place + 2] = scale.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_mixed(path: Path, kind: Kind) -> tuple[Path, RandomModel]:
    """Write a model whose queries and gates are of a type; return its weights in float32 too."""
    model = random_model("llama", **WIDE)
    model = RandomModel(model.config, dequantised(model, Kind.F16).weights)
    replaced: dict[str, tuple[np.ndarray, Kind]] = {}
    for seed, (name, weight) in enumerate(CHANGED.items()):
        shape = model.weights[weight].shape
        if kind in HALVES:
            data = random_blocks(kind, (shape[0], shape[1]), seed)
        else:
            data = gguf.quantize(model.weights[weight], kind)
        exact = gguf.dequantize(data, kind)
        if ".attn_q." in name:
            heads = exact.reshape(-1, WIDE["head_dim"] // 2, 2, shape[1])
            exact = heads.swapaxes(1, 2).reshape(shape)
        model.weights[weight] = exact
        replaced[name] = (data, kind)
    return write_gguf(path, model, Kind.F16, replaced=replaced), model


@pytest.mark.parametrize("kind", [*HALVES, Kind.Q5_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_other_types_are_quantised_anew(tmp_path: Path, kind: Kind) -> None:
    path, model = write_mixed(tmp_path / "model.gguf", kind)
    shares: list[float] = []
    losses = convert(path, tmp_path / "out", None, shares.append)
    assert [loss.tensor.name for loss in losses] == [*CHANGED]
    assert all(0 <= loss.relative < WORST[kind] for loss in losses)
    assert shares[-1] == 1
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert isinstance(arrays, dict)
    for loss, weight in zip(losses, CHANGED.values(), strict=True):
        stem = weight.removesuffix("weight")
        packed, *others = (arrays[stem + leaf] for leaf in ("weight", "scales", "biases"))
        wide = [array.astype(mx.float32) for array in others]
        own = np.array(mx.dequantize(packed, *wide, group_size=32, bits=loss.bits))
        exact = model.weights[weight]
        error = np.sqrt(np.square(own - exact).sum() / np.square(exact).sum())
        assert error == pytest.approx(loss.relative, rel=1e-3)
    if kind in (Kind.Q5_0, Kind.Q5_1):
        reference = logits(write_folder(tmp_path / "folder", model))
        difference = np.abs(logits(tmp_path / "out") - reference).max()
        assert difference <= 0.01 * np.abs(reference).max()


def test_all_types_are_known() -> None:
    named = {kind.name for kind in TYPES.values()}
    assert {kind.name for kind in Kind} == named
    assert set(BITS) <= named - set(SERVED)
    for kind, (size, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        own = TYPES[kind.value]
        assert (own.name, own.block_size, own.block_bytes) == (kind.name, size, num_bytes)
    for name in BITS:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[Kind[name]][1]), np.uint8)
        gguf.dequantize(block, Kind[name])
    assert GGUF_BITS == CHOICES


@pytest.mark.parametrize("bits", CHOICES)
def test_numbers_are_packed_as_mlx_reads_them(bits: int) -> None:
    exact = np.random.default_rng(bits).standard_normal((40, 32)).astype(np.float32)
    numbers, scales, biases = quantised(exact, bits, is_grid=False)
    arrays = [mx.array(each.reshape(10, -1)) for each in (pack(numbers, bits), scales, biases)]
    wide = [arrays[0], *(each.astype(mx.float32) for each in arrays[1:])]
    own = np.array(mx.dequantize(*wide, group_size=32, bits=bits))
    np.testing.assert_allclose(own.reshape(40, 32), unpacked(numbers, scales, biases), rtol=1e-6)


def test_groups_of_one_number_are_kept() -> None:
    exact = np.repeat(np.array([[0.0], [0.5], [-3.0]], np.float32), 32, axis=1)
    for is_grid in (True, False):
        np.testing.assert_array_equal(unpacked(*quantised(exact, 4, is_grid)), exact)


def test_more_bits_lose_less(tmp_path: Path) -> None:
    path, _ = write_mixed(tmp_path / "model.gguf", Kind.Q6_K)
    errors = [
        convert(path, tmp_path / str(bits), bits, lambda share: None)[0].relative
        for bits in CHOICES
    ]
    assert errors == sorted(errors, reverse=True)


def test_the_loss_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write_mixed(tmp_path / "model.gguf", Kind.Q4_K)
    assert convert_main([str(path), "--mlx-path", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"blk\.0\.attn_q\.weight +Q4_K +4 +0\.\d{5}", shown)
    assert re.search(r"mean 0\.\d{5}, worst 0\.\d{5} \(blk\.", shown)
    same = write_gguf(tmp_path / "same.gguf", random_model("llama"), Kind.Q4_0)
    assert convert_main([str(same), "--mlx-path", str(tmp_path / "same")]) == 0
    assert "serve the file itself" in capsys.readouterr().out


def test_the_command_converts_in_a_process(tmp_path: Path) -> None:
    path, _ = write_mixed(tmp_path / "model.gguf", Kind.Q5_0)
    out = tmp_path / "out"
    assert main(["models", "convert", str(path), "--mlx-path", str(out), "--q-bits", "8"]) == 0
    assert (out / "model.safetensors").is_file()
    assert main(["models", "convert", "/no/file.gguf", "--mlx-path", str(tmp_path / "no")]) == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-q"], "--quantize"),
        (["--dtype", "float16"], "--dtype"),
        (["--q-mode", "mxfp4"], "--q-mode"),
        (["--q-bits", "7"], "7 is not one of"),
    ],
)
def test_flags_for_folders_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    command = ["models", "convert", "model.gguf", "--mlx-path", str(tmp_path / "out"), *flags]
    assert main(command) == 2
    assert words in capsys.readouterr().err


def test_the_package_is_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"mlx-parallm\[gguf\]"):
        convert(tmp_path / "model.gguf", tmp_path / "out", None, lambda share: None)


def test_types_that_nothing_unpacks_are_refused(tmp_path: Path) -> None:
    model = random_model("llama", **WIDE)
    data = np.zeros((WIDE["intermediate_size"], WIDE["hidden_size"]), np.int8)
    replaced = {"blk.0.ffn_up.weight": (data, Kind.I8)}
    path = write_gguf(tmp_path / "model.gguf", model, Kind.F16, replaced=replaced)
    with pytest.raises(ModelLoadError, match="type I8"):
        convert(path, tmp_path / "out", None, lambda share: None)
    assert not (tmp_path / "out").exists()
