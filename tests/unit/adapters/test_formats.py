"""Adapters as PEFT and mlx-lm write them, and bytes of strangers."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.formats import read_adapter, read_adapter_folder
from mlx_parallm.adapters.safetensors import MODEL_DTYPES, read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.errors import InvalidRequestError
from tests.host_tensors import host

PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def saved(tensors: dict[str, mx.array]) -> bytes:
    """Return a file as MLX writes it."""
    buffer = io.BytesIO()
    buffer.name = "adapter.safetensors"
    mx.save_safetensors(buffer, tensors)
    return buffer.getvalue()


def random(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def drawn(*shape: int) -> HostTensor:
    return host(random(*shape))


def peft_tensors(rank: int = 4) -> dict[str, HostTensor]:
    return {f"{PREFIX}.lora_A.weight": drawn(rank, 16), f"{PREFIX}.lora_B.weight": drawn(8, rank)}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_mlx_saves_is_read(dtype: mx.Dtype) -> None:
    tensors = {"b": random(3, 5, dtype=dtype), "a": random(7, dtype=dtype)}
    tensors_read = read_safetensors(saved(tensors), param="file")
    assert set(tensors_read) == {"a", "b"}
    for name, array in tensors.items():
        read = to_mlx(tensors_read[name])
        assert read.dtype == dtype
        assert mx.array_equal(read, array)
        assert tensors_read[name].dtype == str(dtype).removeprefix("mlx.core.")


def test_tensors_of_packed_models_are_read_where_they_are_asked_for() -> None:
    tensors = {
        "packed": mx.arange(12, dtype=mx.uint32).reshape(3, 4),
        "ids": mx.arange(5, dtype=mx.int64),
        "bytes": mx.arange(7, dtype=mx.uint8),
        "one": mx.array(2.5),
    }
    tensors_read = read_safetensors(saved(tensors), param="file", dtypes=MODEL_DTYPES)
    for name, array in tensors.items():
        assert to_mlx(tensors_read[name]).dtype == array.dtype
        assert to_mlx(tensors_read[name]).tolist() == array.tolist()
        assert tensors_read[name].is_finite()
    with pytest.raises(InvalidRequestError, match="U32, not of BF16, F16, F32"):
        read_safetensors(saved({"packed": tensors["packed"]}), param="file")
    data = forged({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, b"\x38\x7f")
    (eighth,) = read_safetensors(data, param="file", dtypes=MODEL_DTYPES).values()
    assert to_mlx(eighth).tolist() == [0x38, 0x7F]


def test_tensors_that_begin_at_odd_bytes_are_read() -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for spaces in range(4):
        data = forged(header + b" " * spaces, np.array([1.5, -2], "<f4").tobytes())
        (tensor,) = read_safetensors(data, param="file").values()
        assert to_mlx(tensor).tolist() == [1.5, -2]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_found(dtype: mx.Dtype, bad: float) -> None:
    largest = mx.finfo(dtype).max
    good = mx.array([[0.0, -0.0, largest], [-largest, 1e-40, 1]], dtype)
    assert host(good).is_finite()
    assert host(good).transposed().is_finite()
    for place in range(good.size):
        wrong = good.flatten()
        wrong[place] = bad
        assert not host(wrong.reshape(good.shape)).transposed().is_finite()


def test_transposing_copies_nothing_and_tells_the_order() -> None:
    tensor = host(random(3, 5, dtype=mx.bfloat16))
    turned = tensor.transposed()
    assert np.shares_memory(tensor.array, turned.array)
    assert (turned.shape, turned.dtype) == ((5, 3), "bfloat16")
    assert mx.array_equal(to_mlx(turned), to_mlx(tensor).T)
    assert bytes(tensor.stored()[0]) == bytes(turned.stored()[0])
    assert tensor.stored()[1] != turned.stored()[1]


GOOD = saved({"b": random(3, 5), "a": random(7)})


@given(st.integers(0, len(GOOD) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match="not a safetensors"):
        read_safetensors(GOOD[:length], param="file")


@given(st.binary(max_size=64))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a safetensors"):
        read_safetensors(data, param="file")


def forged(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        forged([]),
        forged({"a": 1}),
        forged({"a": {"dtype": "F32", "shape": [1]}}),
        forged({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, -4]}}),
        forged({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        forged({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        forged({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
        forged({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"),
        forged({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"),
        forged(b'{"a": {}, "a": {}}'),
        forged(b"[" * 100_000),
        forged(
            {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, b"1234"
        ),
    ],
)
def test_forged_headers_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a safetensors") as refusal:
        read_safetensors(data, param="file")
    assert refusal.value.param == "file"


NOT_FINITE = host(mx.full((4, 16), np.nan))


def test_peft() -> None:
    adapter = read_adapter(PEFT, peft_tensors(), param="adapter")
    (path,) = adapter.modules
    module = adapter.modules[path]
    assert (path, module.kind, module.rank) == ("model.layers.0.self_attn.q_proj", "linear", 4)
    assert module.scale == 2.0
    assert (module.a.shape, module.b.shape) == ((4, 16), (8, 4))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {r"layers\.0\..*": 5}}, 5 / 4),
        ({"alpha_pattern": {"k_proj": 3}}, 8 / 4),
        # The rank is that of the tensors: rank_pattern may have changed it.
        ({"r": 64, "rank_pattern": {"q_proj": 4}}, 8 / 4),
    ],
)
def test_scales_of_peft(config: dict[str, Any], scale: float) -> None:
    adapter = read_adapter(PEFT | config, peft_tensors(), param="adapter")
    assert [module.scale for module in adapter.modules.values()] == [scale]


def test_embeddings_and_magnitudes_of_peft() -> None:
    embedding = "base_model.model.model.embed_tokens"
    tensors = peft_tensors() | {
        f"{embedding}.lora_embedding_A": drawn(4, 100),
        f"{embedding}.lora_embedding_B": drawn(16, 4),
        f"{PREFIX}.lora_magnitude_vector.weight": drawn(8),
    }
    modules = read_adapter(PEFT | {"use_dora": True}, tensors, param="adapter").modules
    assert modules["model.embed_tokens"].kind == "embedding"
    assert not modules["model.embed_tokens"].changes_head
    magnitude = modules["model.layers.0.self_attn.q_proj"].magnitude
    assert magnitude is not None
    assert magnitude.shape == (8,)


def test_experts_of_peft_are_put_together() -> None:
    tensors = {}
    for number in (1, 0, 2):
        name = f"base_model.model.model.layers.3.mlp.experts.{number}.up_proj"
        tensors[f"{name}.lora_A.weight"] = host(mx.full((2, 6), number))
        tensors[f"{name}.lora_B.weight"] = host(mx.full((5, 2), number))
    modules = read_adapter(PEFT, tensors, param="adapter").modules
    module = modules["model.layers.3.mlp.switch_mlp.up_proj"]
    assert (module.kind, module.a.shape, module.b.shape) == ("experts", (3, 2, 6), (3, 5, 2))
    assert module.a.array[:, 0, 0].tolist() == [0, 1, 2]
    mixtral = {name.replace("up_proj", "w3"): tensor for name, tensor in tensors.items()}
    assert set(read_adapter(PEFT, mixtral, param="adapter").modules) == set(modules)
    del tensors["base_model.model.model.layers.3.mlp.experts.1.up_proj.lora_A.weight"]
    with pytest.raises(InvalidRequestError, match="no lora_A"):
        read_adapter(PEFT, tensors, param="adapter")


EXPERT = "base_model.model.model.layers.3.mlp.experts.0.up_proj"


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (
            PEFT | {"use_dora": True},
            {
                f"{EXPERT}.lora_A.weight": drawn(2, 6),
                f"{EXPERT}.lora_B.weight": drawn(5, 2),
                f"{EXPERT}.lora_magnitude_vector.weight": drawn(5),
            },
        ),
        (
            {"fine_tune_type": "dora", "lora_parameters": {"scale": 2.0}},
            {
                "model.layers.3.mlp.switch_mlp.up_proj.lora_a": drawn(3, 2, 6),
                "model.layers.3.mlp.switch_mlp.up_proj.lora_b": drawn(3, 5, 2),
                "model.layers.3.mlp.switch_mlp.up_proj.m": drawn(3, 5),
            },
        ),
    ],
)
def test_dora_of_experts_is_refused_by_name(
    config: dict[str, Any], tensors: dict[str, HostTensor]
) -> None:
    why = r"DoRA of experts \(model\.layers\.3\.mlp\.switch_mlp\.up_proj\) is not supported, LoRA"
    with pytest.raises(InvalidRequestError, match=why):
        read_adapter(config, tensors, param="adapter")
    # It is never read as a LoRA.
    without = {
        name: tensor for name, tensor in tensors.items() if not name.endswith((".m", "r.weight"))
    }
    with pytest.raises(InvalidRequestError, match=r"has no (m|lora_magnitude_vector)"):
        read_adapter(config, without, param="adapter")


def test_mlx_lm_trains_no_dora_of_experts() -> None:
    layer = SwitchLinear(8, 8, 2)
    model = nn.Sequential(layer)
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0}
    with pytest.raises(ValueError, match="SwitchLinear doesn't support DoRA"):
        linear_to_lora_layers(model, 1, parameters, use_dora=True)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_what_mlx_lm_trains(tmp_path: Path, kind: str) -> None:
    args = dict.fromkeys(["rms_norm_eps", "rope_theta"], 1e-6) | {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    model = qwen3.Model(qwen3.ModelArgs.from_dict(args))
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    if kind == "lora":
        keys.append("embed_tokens")
    parameters = {"rank": 3, "scale": 5.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    leaves: Any = tree_flatten(model.parameters())
    mine = {n: v for n, v in leaves if n.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), mine)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapter = read_adapter_folder(tmp_path, param="adapter")
    module = adapter.modules["model.layers.1.mlp.down_proj"]
    assert (module.kind, module.scale, module.a.shape, module.b.shape) == (
        "linear",
        5.0,
        (3, 48),
        (32, 3),
    )
    assert (module.magnitude is not None) == (kind == "dora")
    assert adapter.rank == 3


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        ({"peft_type": "IA3"}, {}, "not LORA"),
        (PEFT, {}, "changes nothing"),
        (PEFT | {"modules_to_save": ["lm_head"]}, peft_tensors(), "modules_to_save"),
        (PEFT | {"bias": "all"}, peft_tensors(), "biases"),
        (PEFT | {"lora_alpha": "x"}, peft_tensors(), "lora_alpha"),
        (PEFT | {"alpha_pattern": {"(": 1}}, peft_tensors(), "alpha_pattern"),
        (PEFT, peft_tensors() | {"something": drawn(2)}, "not known"),
        (PEFT, {f"{PREFIX}.lora_A.weight": drawn(4, 16)}, "no lora_B"),
        (PEFT, peft_tensors() | {f"{PREFIX}.lora_B.weight": drawn(8, 3)}, "ranks"),
        (PEFT, peft_tensors() | {f"{PREFIX}.lora_B.weight": drawn(8)}, "shape"),
        (PEFT, peft_tensors() | {f"{PREFIX}.lora_magnitude_vector": drawn(7)}, "magnitudes"),
        (
            PEFT,
            peft_tensors() | {f"{PREFIX}.lora_A.weight": host(mx.full((4, 16), np.nan))},
            "finite",
        ),
        (
            PEFT,
            {
                "model.embed_tokens.lora_embedding_A": drawn(4, 100),
                "model.embed_tokens.lora_embedding_B": drawn(16, 4),
                "model.embed_tokens.lora_magnitude_vector.weight": drawn(16),
            },
            "DoRA of embeddings",
        ),
        ({"fine_tune_type": "full"}, {}, "neither lora nor dora"),
        ({"lora_parameters": {"scale": None}}, {}, "scale"),
        ({}, {}, "scale"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    config: dict[str, Any], tensors: dict[str, HostTensor], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as refusal:
        read_adapter(config, tensors, param="adapter")
    assert refusal.value.param == "adapter"


def test_the_digest_is_of_what_the_adapter_does() -> None:
    def digest(config: dict[str, Any] = PEFT, **changed: HostTensor) -> str:
        tensors = {
            name: changed.get(name[-13:-7], tensor) for name, tensor in peft_tensors().items()
        }
        return read_adapter(config, tensors, param="adapter").digest

    same = digest()
    assert digest(PEFT | {"base_model_name_or_path": "other"}) == same
    assert digest(PEFT | {"lora_alpha": 9}) != same
    assert digest(lora_A=host(random(4, 16) + 1e-3)) != same
    assert digest(lora_A=host(random(4, 16, dtype=mx.bfloat16))) != same


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json"):
        read_adapter_folder(tmp_path, param="adapter")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(InvalidRequestError, match="must be a JSON object"):
        read_adapter_folder(tmp_path, param="adapter")
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidRequestError, match="other formats are not supported"):
        read_adapter_folder(tmp_path, param="adapter")


PLAIN = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
CHANGED = ("pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga")
VARIANTS: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 1], [0, 1]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1],
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 8},
    "use_bdlora": {"nblocks": 2},
    "lora_bias": True,
    "bias": "all",
}


@pytest.mark.parametrize("start", PLAIN)
def test_starts_that_leave_the_model_as_it_is_are_plain_lora(start: Any) -> None:
    plain = read_adapter(PEFT, peft_tensors(), param="file")
    other = read_adapter(
        {**PEFT, "init_lora_weights": start, "use_qalora": True, "velora_config": {"rank": 1}},
        peft_tensors(),
        param="file",
    )
    assert other.digest == plain.digest


@pytest.mark.parametrize("start", CHANGED)
def test_starts_that_change_the_model_are_refused_by_name(start: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"init_lora_weights '{start.lower()}'"):
        read_adapter({**PEFT, "init_lora_weights": start}, peft_tensors(), param="file")


def test_unknown_starts_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'other' is not known"):
        read_adapter({**PEFT, "init_lora_weights": "other"}, peft_tensors(), param="file")


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_lora_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="biases" if "bias" in name else name):
        read_adapter({**PEFT, name: VARIANTS[name]}, peft_tensors(), param="file")
    unset = {name: "none" if name == "bias" else None}
    assert read_adapter({**PEFT, **unset}, peft_tensors(), param="file")


TABLE = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"


def table_tensors() -> dict[str, HostTensor]:
    """Return what PEFT writes of a tied table of 7 tokens and 3 dimensions."""
    a, b = drawn(2, 7), drawn(3, 2)
    return {
        f"{TABLE}.base_layer.weight": drawn(7, 3),
        f"{TABLE}.lora_embedding_A": a,
        f"{TABLE}.lora_embedding_B": b,
        f"{HEAD}.base_layer.weight": drawn(7, 3),
        f"{HEAD}.lora_A.weight": host(to_mlx(b).T),
        f"{HEAD}.lora_B.weight": host(to_mlx(a).T),
    }


def test_weights_that_peft_repeats_are_kept_apart() -> None:
    adapter = read_adapter(PEFT, table_tensors(), param="file")
    assert adapter.copies.keys() == {"model.embed_tokens", "lm_head"}
    assert adapter.modules.keys() == {"model.embed_tokens", "lm_head"}
    assert not adapter.modules["model.embed_tokens"].changes_head
    assert adapter.of_checkpoint
    alone = {f"{HEAD}.base_layer.weight": drawn(7, 3), **peft_tensors()}
    with pytest.raises(InvalidRequestError, match="lm_head, which it does not change"):
        read_adapter(PEFT, alone, param="file")


def test_tied_factors_are_one_change_of_the_embedding_and_the_head() -> None:
    tied = {**PEFT, "ensure_weight_tying": True}
    adapter = read_adapter(tied, table_tensors(), param="file")
    assert adapter.modules.keys() == adapter.copies.keys() == {"model.embed_tokens"}
    assert adapter.modules["model.embed_tokens"].changes_head
    others = {**table_tensors(), f"{HEAD}.lora_B.weight": drawn(7, 2)}
    assert read_adapter(tied, others, param="file").modules.keys() == {
        "model.embed_tokens",
        "lm_head",
    }
