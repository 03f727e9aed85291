"""Rows with different adapters in one step, against models with those adapters alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from benchmarks.gpu.shapes import random_model
from mlx_parallm.adapters.context import AdapterContext
from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.attention.reference import ReferenceAttention
from mlx_parallm.batch import ScheduledSequence
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.runner.adapted_layers import AdaptedLayers
from mlx_parallm.runner.cache_layout import probe_layout
from mlx_parallm.runner.group_cache import CacheViews
from mlx_parallm.runner.kv_pools import KVPools
from mlx_parallm.runner.path_choice import choose_path
from mlx_parallm.runner.paths.base import token_array
from mlx_parallm.runner.paths.sequential import SequentialPath
from tests.host_tensors import all_host

BLOCK = 8
LENGTH, CHUNK = 21, 9
KEYS = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
#: Keys, rank, scale and kind, by slot.
ADAPTERS: dict[int, tuple[list[str], int, float, str]] = {
    1: (KEYS, 4, 4.0, "lora"),
    2: (["mlp.down_proj", "self_attn.k_proj"], 16, 2.0, "dora"),
    3: (["mlp.up_proj", "model.embed_tokens", "lm_head"], 8, 3.0, "lora"),
}
#: The slots of the sequences of a step.
ROWS = (1, 0, 2, 3, 1)


def train(model: Any, slot: int) -> tuple[dict[str, Any], dict[str, HostTensor]]:
    """Give the model an adapter of mlx_lm; its config and tensors as mlx_lm saves them."""
    keys, rank, scale, kind = ADAPTERS[slot]
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=kind == "dora")
    mx.random.seed(slot)
    changed = {}
    for name, value in tree_flatten(model.parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("lora_a", "lora_b"):
            changed[name] = mx.random.normal(value.shape) * 0.1
        elif leaf == "m":
            changed[name] = value * mx.random.uniform(0.5, 1.5, value.shape)
    model.update(tree_unflatten(list(changed.items())))
    return {"fine_tune_type": kind, "lora_parameters": parameters}, all_host(changed)


@pytest.mark.parametrize(
    ("shape", "wanted"), [("tiny", "packed"), ("tiny hybrid", "split"), ("tiny", "sequential")]
)
def test_rows_of_different_adapters_equal_each_alone(shape: str, wanted: str) -> None:
    base = random_model(shape, dtype=mx.float32)
    adapters, targets = {}, {}
    for slot in ADAPTERS:
        other = random_model(shape, dtype=mx.float32).model
        config, tensors = train(other, slot)
        adapters[slot] = read_adapter(config, tensors, param="adapter")
        targets[slot] = other
    targets[0] = random_model(shape, dtype=mx.float32).model
    model = base.model
    layouts = probe_layout(model)
    backend = ReferenceAttention(BLOCK)
    width = -(-LENGTH // BLOCK)
    path = choose_path(
        model,
        layouts,
        backend,
        vocab_size=base.vocab_size,
        num_blocks=max(64, len(ROWS) * width),
        block_size=BLOCK,
        dtype="float32",
    ).path
    if wanted == "sequential":
        path = as_sequential(model, layouts, backend, len(ROWS) * width)
    assert path.name == wanted
    layers = AdaptedLayers(model, mx.float32, path.adapters)
    for slot, adapter in adapters.items():
        layers.put(slot, adapter, param="adapter")
    texts = [mx.random.randint(0, base.vocab_size, (LENGTH,)).tolist() for _ in ROWS]
    for start, end in [(0, CHUNK), (CHUNK, LENGTH - 2), (LENGTH - 2, LENGTH - 1)]:
        sequences = [sequence(i, text[start:end], start) for i, text in enumerate(texts)]
        rows = [(i + 1) * (end - start) - 1 for i in range(len(texts))]
        found = path.logits(sequences, token_array(sequences), rows)
        mx.eval(found, path.arrays())
        for i, text in enumerate(texts):
            target = targets[ROWS[i]]
            alone = target(mx.array([text[:end]]), cache=make_prompt_cache(target))[0, -1]
            assert mx.allclose(found[i], alone, rtol=1e-4, atol=1e-4), (ROWS[i], start)
    layers.drop(1)
    sequences = [sequence(i, text[LENGTH - 1 :], LENGTH - 1) for i, text in enumerate(texts)]
    found = path.logits(sequences, token_array(sequences), list(range(len(texts))))
    mx.eval(found, path.arrays())
    assert not mx.allclose(found[0], targets[1](mx.array([texts[0]]))[0, -1], rtol=1e-4, atol=1e-4)
    alone = targets[2](mx.array([texts[2]]))[0, -1]
    assert mx.allclose(found[2], alone, rtol=1e-4, atol=1e-4)


def as_sequential(model: Any, layouts: Any, backend: Any, num_blocks: int) -> Any:
    pools = KVPools(backend, [one.shape for one in layouts], num_blocks)
    return SequentialPath(model, CacheViews(layouts, pools, backend), pools, backend, BLOCK)


def sequence(number: int, token_ids: list[int], start: int) -> ScheduledSequence:
    width = -(-LENGTH // BLOCK)
    return ScheduledSequence(
        seq_id=number,
        slot=number,
        start=start,
        token_ids=tuple(token_ids),
        block_table=tuple(range(number * width, (number + 1) * width)),
        adapter_slot=ROWS[number],
    )


def test_an_adapter_that_does_not_fit_changes_nothing() -> None:
    model = random_model("tiny", dtype=mx.float32).model
    layers = AdaptedLayers(model, mx.float32, AdapterContext())
    config, tensors = train(random_model("tiny", dtype=mx.float32).model, 1)
    renamed = {name.replace("q_proj", "z_proj"): one for name, one in tensors.items()}
    with pytest.raises(InvalidRequestError, match="z_proj"):
        layers.put(1, read_adapter(config, renamed, param="adapter"), param="adapter")
    cut = {
        name: HostTensor(one.array[:-1]) if name.endswith("q_proj.lora_a") else one
        for name, one in tensors.items()
    }
    with pytest.raises(InvalidRequestError, match="does not fit"):
        layers.put(1, read_adapter(config, cut, param="adapter"), param="adapter")
    assert layers.num_bytes == 0
