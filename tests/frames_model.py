"""An encoder-decoder whose sources are frames of numbers, as those of speech are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.seq2seq.dense_cache import DenseSourceCache
from mlx_parallm.models.seq2seq.interface import EncoderStages, SourceCache
from mlx_parallm.worker.weights.loader import LoadedModel

#: ``FRAMES``: the array of a source, float32 ``[frames, BINS]``. Two frames are one position.
FRAMES, BINS = "frames", 6
VOCAB_SIZE, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 32, 4, 2, 8, 2
MAX_POSITIONS = 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH)


def heads(rows: mx.array) -> mx.array:
    return rows.reshape(*rows.shape[:2], -1, HEAD_DIM).swapaxes(1, 2)


def rows(heads: mx.array) -> mx.array:
    return heads.swapaxes(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array, cache: SourceCache) -> mx.array:
        own = self.own
        attended = cache.attend(
            heads(own.q(x)), heads(own.k(x)), heads(own.v(x)), scale=HEAD_DIM**-0.5
        )
        x = x + own.o(rows(attended))
        attended = cache.attend_source(heads(self.cross.q(x)), scale=HEAD_DIM**-0.5)
        x = x + self.cross.o(rows(attended))
        return x + nn.gelu(self.dense(x))


class FramesModel(nn.Module):
    max_source_len: int | None = MAX_POSITIONS
    num_encoder_stages = 3

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(2 * BINS, WIDTH)
        self.encoder = Attention()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.positions = nn.Embedding(256, WIDTH)
        self.layers = [Layer() for _ in range(LAYERS)]

    def make_cache(self) -> list[Any]:
        return [DenseSourceCache() for _ in self.layers]

    def encode(self, sources: Sequence[Mapping[str, mx.array]]) -> EncoderStages:
        """Compute sources of equal lengths."""
        # [1, T, WIDTH]: packed rows.
        x = self.read(mx.concatenate([each[FRAMES] for each in sources]).reshape(1, -1, 2 * BINS))
        yield x
        own, length = self.encoder, x.shape[1] // len(sources)
        queries, keys, values = (
            heads(part(x).reshape(len(sources), length, -1)) for part in (own.q, own.k, own.v)
        )
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=HEAD_DIM**-0.5)
        x = x + own.o(rows(attended).reshape(1, x.shape[1], -1))
        yield x
        shape = (x.shape[1], KV_HEADS, 1, HEAD_DIM)
        return [
            (layer.cross.k(x).reshape(shape), layer.cross.v(x).reshape(shape))
            for layer in self.layers
        ]

    def __call__(self, tokens: mx.array, cache: Sequence[SourceCache] | None = None) -> mx.array:
        caches: Sequence[SourceCache] = cache or self.make_cache()
        places = mx.array(caches[0].offset)[..., None] + mx.arange(tokens.shape[1])
        x = self.embed(tokens) + self.positions(places)
        for layer, own in zip(self.layers, caches, strict=True):
            x = layer(x, own)
        return self.embed.as_linear(x)

    def example_source(self, length: int) -> Mapping[str, mx.array]:
        """Return a source of so many positions."""
        return frames_of(length, seed=length)


def frames_of(length: int, *, seed: int) -> dict[str, mx.array]:
    numbers = np.random.default_rng(seed).normal(size=(2 * length, BINS))
    return {FRAMES: mx.array(numbers.astype(np.float32))}


def frames_model(seed: int = 0) -> LoadedModel:
    """Return the model with random weights, in which a source changes what is likely."""
    mx.random.seed(seed)
    model = FramesModel()
    for module in (*[layer.cross for layer in model.layers], model.encoder, model.read):
        module.apply(lambda array: array * 3)
    mx.eval(model.parameters())
    config = {"model_type": "frames", "vocab_size": VOCAB_SIZE, "num_attention_heads": HEADS}
    return LoadedModel(model, config, Path("frames"), "float32", 0)
