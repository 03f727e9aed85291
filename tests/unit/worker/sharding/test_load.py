"""Loads of one rank's part, in one process: what is refused, and when, and what is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.config import EngineConfig, ModelConfig, SpeculativeConfig
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, ModelLoadError
from mlx_parallm.worker.device.ranks import Ranks, all_succeed
from mlx_parallm.worker.generation.load.loading import GenerationLoader
from mlx_parallm.worker.generation.load.plan import GenerationSpec
from mlx_parallm.worker.ops import Load
from mlx_parallm.worker.sharding.check import check_shardable
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from mlx_parallm.worker.weights.model_weights import ModelWeights
from mlx_parallm.worker.worker import Worker
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.cluster.sharded_models import DENSE, write_model, write_unreadable
from tests.golden_images import read_vision, write_vision


def ranks_of(size: int) -> Ranks:
    """Return rank 0 of some, in a group of this process alone: sums are its own values."""
    return Ranks(rank=0, size=size, backend="any", group=mx.distributed.init())


class OtherRankFails(Ranks):
    """A rank beside one that fails."""

    def agree(self, verdict: bool) -> bool:
        """Return False: the other rank passes it."""
        return False


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    parameters: Any = tree_flatten(model.parameters())
    return parameters


@pytest.mark.parametrize(
    ("config", "size", "why"),
    [
        (
            config_of("gemma"),
            2,
            "(gemma, num_attention_heads 4, num_key_value_heads 2) cannot be computed by 2 ranks: "
            "mlx_lm has no method shard for this architecture.",
        ),
        (
            config_of("llama"),
            3,
            "(llama, num_attention_heads 4, num_key_value_heads 2) cannot be computed by 3 ranks: "
            "3 does not divide its num_attention_heads of 4.",
        ),
        (
            config_of("qwen3"),
            4,
            "(qwen3, num_attention_heads 4, num_key_value_heads 2) cannot be computed by 4 ranks: "
            "4 does not divide its num_key_value_heads of 2.",
        ),
        (
            {**DENSE, "intermediate_size": 129},
            2,
            "(qwen2, num_attention_heads 4, num_key_value_heads 4) cannot be computed by 2 ranks: "
            "2 does not divide the 129 rows or columns of model.layers.0.mlp.gate_proj.weight.",
        ),
        (
            config_of("qwen3_5"),
            4,
            "(qwen3_5, num_attention_heads 4, num_key_value_heads 2) cannot be computed by 4 "
            "ranks: 4 does not divide its num_k_heads of 2.",
        ),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_before_weights_are_read(
    tmp_path: Path, config: dict[str, Any], size: int, why: str
) -> None:
    folder = write_unreadable(tmp_path / "model", config)
    with pytest.raises(ConfigError) as refusal:
        load_model(ModelConfig(), folder, ranks=ranks_of(size))
    assert str(refusal.value) == f"{folder} {why}"
    with pytest.raises(ModelLoadError, match="NaN"):
        load_model(ModelConfig(), folder)


def test_groups_of_quantised_weights_are_not_cut(tmp_path: Path) -> None:
    config = {**DENSE, "intermediate_size": 96}
    folder = write_model(tmp_path / "model", config, bits=4)
    with pytest.raises(ConfigError, match=r"2 does not divide the 3 rows or columns of \S+scales"):
        load_model(ModelConfig(), folder, ranks=ranks_of(2))


def test_a_model_with_a_tower_is_read_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_vision(tmp_path / "model", read_vision("qwen3_5"))
    with caplog.at_level(logging.WARNING):
        loaded = load_model(ModelConfig(), folder, ranks=ranks_of(1))
    assert not hasattr(loaded.model, TOWER)
    assert not any(TOWER in name or "visual" in name for name, _ in _flat(loaded.model))
    assert f"{folder} is read as a text model" in caplog.text
    assert hasattr(load_model(ModelConfig(), folder).model, TOWER)


def test_draft_models_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = write_unreadable(tmp_path / "model", DENSE)
    worker = Worker()
    worker.install(GenerationSpec, GenerationLoader(ranks=ranks_of(2)))
    speculative = SpeculativeConfig(method="draft_model", model="small")
    spec = GenerationSpec(
        config=ModelConfig(path=str(folder)),
        path=folder,
        settings=EngineConfig(speculative=speculative),
    )
    with pytest.raises(ConfigError) as refusal:
        worker.execute(Load(model="model", spec=spec))
    assert str(refusal.value) == (
        "--speculative-config: the draft model small cannot propose tokens to "
        f"{folder}, which 2 ranks compute; n-grams can."
    )


def test_a_rank_fails_with_the_rank_that_cannot_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", DENSE)
    ranks = OtherRankFails(rank=0, size=1, backend="any", group=mx.distributed.init())
    with pytest.raises(ModelLoadError, match="by another rank"):
        load_model(ModelConfig(), folder, ranks=ranks)


def test_an_error_of_this_rank_is_told_to_the_others() -> None:
    verdicts: list[bool] = []

    class Recording(Ranks):
        def agree(self, verdict: bool) -> bool:
            verdicts.append(verdict)
            return verdict

    ranks = Recording(rank=0, size=2, backend="any", group=None)
    with pytest.raises(OSError, match="gone"), all_succeed(ranks):
        raise OSError("gone")
    with all_succeed(ranks):
        pass
    assert verdicts == [False, True]


def test_layers_that_mix_their_inputs_are_refused() -> None:
    config = config_of("prism_hadamard_qwen35")
    with pytest.raises(ConfigError, match="not known how a HadamardQuantizedLinear is cut"):
        check_shardable(build(config), config, Path("model"), 2)


#: ROUNDING: what an allocator adds to arrays of a few bytes, such as the results of checks.
ROUNDING = 1 << 14
#: WIDE: a model whose tensors are large beside what a load takes for itself.
WIDE = {**DENSE, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 128}


def peak_of(work: Callable[[], object]) -> int:
    """Return the bytes that this takes at most, beside those that are in use before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


def test_a_rank_takes_its_share_and_one_tensor(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", WIDE)
    files: Any = mx.load(str(folder / "model.safetensors"))
    sizes = [array.nbytes for array in files.values()]
    loads: list[LoadedModel] = []
    config = ModelConfig(dtype="float32")
    peak = peak_of(lambda: loads.append(load_model(config, folder, ranks=ranks_of(2))))
    share = loads[0].weight_bytes
    assert share < 0.6 * sum(sizes)
    most = share + max(sizes) + ROUNDING
    assert share <= peak <= most
    weights = ModelWeights(loads[0])
    assert share <= peak_of(lambda: weights.read_folder(folder)) <= most
    tensors = {name: to_host(array) for name, array in files.items()}
    assert share <= peak_of(lambda: weights.read_tensors(tensors)) <= most
    weights.offload(keeps=False)
    assert share <= peak_of(weights.fetch) <= most


def test_a_folder_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    loaded = load_model(ModelConfig(), write_model(tmp_path / "a", DENSE), ranks=ranks_of(4))
    other = write_model(tmp_path / "b", {**DENSE, "num_key_value_heads": 2})
    with pytest.raises(InvalidRequestError, match="4 does not divide its num_key_value_heads"):
        ModelWeights(loaded).read_folder(other)
