"""The learned cuts of parameters are those of mlx_lm's ``shard``, and parts make up the whole."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.worker.sharding.cuts import Cut
from mlx_parallm.worker.sharding.learned_cuts import flat_parameters, learn_cuts
from mlx_parallm.worker.sharding.stock_shard import Rank, copy_structure, run_shard
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.cluster.sharded_models import DENSE, EXPERTS, GROUP_SIZE, HYBRID, LATENT, TIED

SIZE = 2
#: CONFIGS: kinds of layers that ``shard`` cuts by its own functions or not at all.
CONFIGS: dict[str, dict[str, Any]] = {
    "tied": TIED,
    "experts": EXPERTS,
    "hybrid with one KV head": HYBRID,
    "latent": LATENT,
    "sinks": config_of("gpt_oss"),
}
QUANTISATIONS = {"4 bits": (4, "affine"), "8 bits": (8, "affine"), "mxfp4": (4, "mxfp4")}


def check(model: Any) -> dict[str, Any]:
    """Fail unless cuts give the parts that ``shard`` does; return the cuts."""
    whole = flat_parameters(model)
    cuts = learn_cuts(model, SIZE).cuts
    parts: dict[str, list[mx.array]] = {name: [] for name in whole}
    for rank in range(SIZE):
        sharded = copy_structure(model)
        run_shard(sharded, Rank(rank, SIZE))
        for name, stock in flat_parameters(sharded).items():
            cut = cuts.get(name)
            part = whole[name] if cut is None else cut.part(whole[name], rank)
            if cut is None or isinstance(cut, Cut):
                assert mx.array_equal(part, stock), name
            parts[name].append(part)
    for name, cut in cuts.items():
        assert mx.array_equal(cut.whole(parts[name]), whole[name]), name
    return cuts


@pytest.mark.parametrize("kind", CONFIGS)
def test_cuts_are_those_of_shard(kind: str) -> None:
    assert check(build(CONFIGS[kind]))


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_quantised_layers_are_cut_between_groups(quantisation: str) -> None:
    bits, mode = QUANTISATIONS[quantisation]
    model = build({**DENSE, "num_hidden_layers": 1})
    nn.quantize(model, group_size=GROUP_SIZE, bits=bits, mode=mode)
    cuts = check(model)
    layer = "model.layers.0.mlp.down_proj"
    for leaf in ("weight", "scales"):
        whole = flat_parameters(model)[f"{layer}.{leaf}"]
        assert cuts[f"{layer}.{leaf}"].pieces == tuple(
            ((rank * whole.shape[-1] // SIZE, (rank + 1) * whole.shape[-1] // SIZE),)
            for rank in range(SIZE)
        )


def test_ranks_have_the_same_kv_head_where_there_are_fewer_than_ranks() -> None:
    cuts = learn_cuts(build(HYBRID), SIZE).cuts
    keys = {name: cut for name, cut in cuts.items() if "self_attn.k_proj" in name}
    assert all(isinstance(cut, Cut) and len(set(cut.pieces)) == 1 for cut in keys.values())


def test_tied_and_other_heads_stay_whole() -> None:
    for config in (TIED, DENSE):
        cuts = learn_cuts(build(config), SIZE).cuts
        assert not [name for name in cuts if "lm_head" in name or "embed_tokens" in name]
