"""Encoders of encoder-decoders: packed sources, tiles of biases, and buckets of distances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.seq2seq import packed_rows
from mlx_parallm.models.seq2seq.dense_cache import encoded
from mlx_parallm.models.seq2seq.packed_rows import TILE, RelativeBias
from mlx_parallm.models.seq2seq.t5 import ModelArgs, bucket_of
from mlx_parallm.types.model_input import TOKEN_IDS
from mlx_parallm.worker.weights.loader import load_model
from tests.encoder_folders import write_golden
from tests.golden_sources import golden_ids
from tests.seq2seq_folders import read_seq2seq

BUCKETS = json.loads(
    (Path(__file__).parents[2] / "golden" / "relative_buckets.json").read_text(encoding="utf-8")
)
#: ``LENGTHS``: tokens of sources around the edges of tiles.
LENGTHS = (1, 3, TILE - 1, TILE, TILE + 1, 2 * TILE + 5, 7)


def load(folder: Path, name: str) -> Any:
    return load_model(ModelConfig(dtype="float32"), write_golden(folder, read_seq2seq(name))).model


def sources_of(lengths: tuple[int, ...]) -> list[dict[str, mx.array]]:
    return [{TOKEN_IDS: mx.array(golden_ids(n, n, 64))} for n in lengths]


@pytest.mark.parametrize("name", ["t5", "umt5", "m2m_100_padding"])
def test_sources_of_all_lengths_are_encoded_as_alone(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, name)
    together = encoded(model, sources_of(LENGTHS))
    begin = 0
    for length, source in zip(LENGTHS, sources_of(LENGTHS), strict=True):
        for rows, alone in zip(together, encoded(model, [source]), strict=True):
            for part, expected in zip(rows, alone, strict=True):
                assert expected.shape == (length, 4, 1, 8)
                own = np.array(part[begin : begin + length])
                bound = 1e-5 * np.abs(np.array(expected)).max()
                np.testing.assert_allclose(own, np.array(expected), atol=bound)
        begin += length


@pytest.mark.parametrize("name", ["t5", "byt5", "bart", "bart_unequal"])
def test_there_are_as_many_stages_as_the_model_says(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, name)
    assert len(list(model.encode(sources_of((3, 5))))) == model.num_encoder_stages - 1
    assert len(encoded(model, sources_of((3, 5)))) == len(model.layers) == len(model.make_cache())


@pytest.mark.parametrize("scores", [packed_rows.TILE_SCORES, 1 << 14, 1])
@pytest.mark.parametrize("longest", LENGTHS)
def test_tiles_are_parts_of_the_whole_bias(
    longest: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_rows, "TILE_SCORES", scores)
    table = np.random.RandomState(longest).standard_normal((2, 2 * longest + 1))

    def bias_of(distances: np.ndarray) -> mx.array:
        # Distances beyond any pair are only ever beside what tiles have.
        return mx.array(table[:, np.clip(distances + longest, 0, 2 * longest)])

    bias = RelativeBias(bias_of, longest, 2, mx.float32)
    assert bias.rows == 1 or (bias.rows <= TILE and 2 * bias.rows * longest <= scores)
    for keys in {1, longest // 2 or 1, longest}:
        places = np.arange(keys)
        whole = np.array(bias_of(places - places[:, None]))
        for first in range(0, keys, max(bias.rows, keys // 8)):
            first -= first % bias.rows
            rows = min(bias.rows, keys - first)
            tile = np.array(bias.tile(first, rows, keys))
            np.testing.assert_array_equal(tile, whole[:, first : first + rows])


@pytest.mark.parametrize("setting", BUCKETS)
def test_buckets_change_where_those_of_transformers_do(setting: dict[str, Any]) -> None:
    args = ModelArgs.from_dict(setting)
    first, last = setting["edges"][0][0], -setting["edges"][0][0]
    distances = np.arange(first, last + 1)
    buckets = bucket_of(distances, args, is_causal=setting["is_causal"])
    changed = np.flatnonzero(np.diff(buckets, prepend=-1))
    assert [[int(distances[i]), int(buckets[i])] for i in changed] == setting["edges"]
    # Beyond the longest distance all are in the last bucket, which the decoder relies on.
    far = args.relative_attention_max_distance
    assert len(set(buckets[distances <= -far].tolist())) == 1
