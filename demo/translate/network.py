"""T5 over padded batches, for training: the served model computes ragged sources instead."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from demo.translate.items import DIRECTIONS
from demo.translate.vocabulary import EOS_ID, MAX_LENGTH, PAD_ID

WIDTH, HEADS, HEAD_WIDTH, INNER = 128, 4, 32, 256
ENCODER_LAYERS, DECODER_LAYERS = 3, 2
FIRST_BIAS = 4.0
"""Bias of the distances that a head prefers as training begins."""


def model_config(vocab_size: int) -> dict[str, Any]:
    """Return the model's ``config.json``."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "d_model": WIDTH,
        "d_kv": HEAD_WIDTH,
        "d_ff": INNER,
        "num_heads": HEADS,
        "num_layers": ENCODER_LAYERS,
        "num_decoder_layers": DECODER_LAYERS,
        "feed_forward_proj": "relu",
        # Every distance within a text has a bucket of its own.
        "relative_attention_num_buckets": 64,
        "relative_attention_max_distance": 64,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.0,
        "initializer_factor": 1.0,
        "tie_word_embeddings": True,
        "n_positions": MAX_LENGTH,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
        "task_specific_params": {
            f"translation_{direction.source}_to_{direction.target}": {"prefix": direction.prefix}
            for direction in DIRECTIONS
        },
    }


def buckets(distances: mx.array, config: dict[str, Any], *, two_way: bool) -> mx.array:
    """Return the bucket of each distance (key minus query), as T5 has them."""
    count = config["relative_attention_num_buckets"]
    offset = mx.zeros_like(distances)
    if two_way:
        count //= 2
        offset = mx.where(distances > 0, count, 0)
        distances = mx.abs(distances)
    else:
        distances = mx.maximum(-distances, 0)
    exact = count // 2
    scale = (count - exact) / math.log(config["relative_attention_max_distance"] / exact)
    far = exact + (mx.log(mx.maximum(distances, 1) / exact) * scale).astype(mx.int32)
    return offset + mx.where(distances < exact, distances, mx.minimum(far, count - 1))


class Attention(nn.Module):
    """Attention without scale, with a bias by distance in a stack's first layer."""

    def __init__(self, config: dict[str, Any], *, has_bias: bool) -> None:
        super().__init__()
        self._heads, inner = config["num_heads"], config["num_heads"] * config["d_kv"]
        self.q, self.k, self.v = (nn.Linear(config["d_model"], inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, config["d_model"], bias=False)
        if has_bias:
            count = config["relative_attention_num_buckets"]
            self.relative_attention_bias = nn.Embedding(count, self._heads)

    def __call__(self, rows: mx.array, memory: mx.array, bias: mx.array) -> mx.array:
        """Attend from ``rows [B, L, E]`` to ``memory [B, S, E]``; ``bias`` hides padding too."""
        heads = (
            each.reshape(*each.shape[:2], self._heads, -1).transpose(0, 2, 1, 3)
            for each in (self.q(rows), self.k(memory), self.v(memory))
        )
        mixed = mx.fast.scaled_dot_product_attention(*heads, scale=1.0, mask=bias)
        return self.o(mixed.transpose(0, 2, 1, 3).reshape(*rows.shape[:2], -1))


class FeedForward(nn.Module):
    """Two matrices with ReLU between."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.wi = nn.Linear(config["d_model"], config["d_ff"], bias=False)
        self.wo = nn.Linear(config["d_ff"], config["d_model"], bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        """Return the rows ``[B, L, E]`` after both."""
        return self.wo(nn.relu(self.wi(rows)))


class Part(nn.Module):
    """A norm and a module whose output is added to the norm's input."""

    def __init__(self, config: dict[str, Any], name: str, module: nn.Module) -> None:
        super().__init__()
        self.layer_norm = nn.RMSNorm(config["d_model"], config["layer_norm_epsilon"])
        self[name] = module


class Stack(nn.Module):
    """The encoder, or the decoder if there is ``memory`` to read."""

    def __init__(self, config: dict[str, Any], layers: int, *, is_decoder: bool) -> None:
        super().__init__()
        self._config, self._is_decoder = config, is_decoder
        self.block = []
        for number in range(layers):
            parts = [Part(config, "SelfAttention", Attention(config, has_bias=number == 0))]
            if is_decoder:
                parts.append(Part(config, "EncDecAttention", Attention(config, has_bias=False)))
            parts.append(Part(config, "DenseReluDense", FeedForward(config)))
            self.block.append({"layer": parts})
        self.final_layer_norm = nn.RMSNorm(config["d_model"], config["layer_norm_epsilon"])

    def __call__(
        self, rows: mx.array, hidden: mx.array, memory: mx.array | None = None
    ) -> mx.array:
        """Return rows ``[B, L, E]``; ``hidden`` is -inf ``[B, 1, 1, S]`` at what is padding."""
        bias = self._bias(rows.shape[1])
        if memory is None:
            bias = bias + hidden
        for block in self.block:
            first, *middle, last = block["layer"]
            normed = first.layer_norm(rows)
            rows = rows + first["SelfAttention"](normed, normed, bias)
            for part in middle:
                rows = rows + part["EncDecAttention"](part.layer_norm(rows), memory, hidden)
            rows = rows + last["DenseReluDense"](last.layer_norm(rows))
        return self.final_layer_norm(rows)

    def _bias(self, length: int) -> mx.array:
        places = mx.arange(length)
        distances = places[None] - places[:, None]
        bias = self.bias_table(self.buckets(distances)).transpose(2, 0, 1)[None]
        return mx.where(distances > 0, -mx.inf, bias) if self._is_decoder else bias

    @property
    def bias_table(self) -> nn.Embedding:
        """The biases of all layers by bucket, ``[buckets, heads]``."""
        return self.block[0]["layer"][0]["SelfAttention"].relative_attention_bias

    def buckets(self, distances: mx.array) -> mx.array:
        """Return the buckets of distances (key minus query)."""
        return buckets(distances, self._config, two_way=not self._is_decoder)


class TrainedT5(nn.Module):
    """T5 with the names of the checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self._scale = config["d_model"] ** -0.5
        self.shared = nn.Embedding(config["vocab_size"], config["d_model"])
        self.encoder = Stack(config, config["num_layers"], is_decoder=False)
        self.decoder = Stack(config, config["num_decoder_layers"], is_decoder=True)

    def __call__(self, sources: mx.array, targets: mx.array) -> mx.array:
        """Return logits ``[B, L, V]`` for ids ``[B, S]``, ``[B, L]``, both padded at the right."""
        hidden = mx.where(sources == PAD_ID, -mx.inf, 0.0)[:, None, None]
        memory = self.encoder(self.shared(sources), hidden)
        rows = self.decoder(self.shared(targets), hidden, memory)
        return self.shared.as_linear(rows * self._scale)


def named_weights(model: nn.Module) -> dict[str, mx.array]:
    """Return a model's weights by their dotted names."""
    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def new_model(config: dict[str, Any], seed: int) -> TrainedT5:
    """Return a model with random float32 weights, as T5's are begun with."""
    mx.random.seed(seed)
    model = TrainedT5(config)
    width, head = config["d_model"], config["d_kv"]
    scales = {"q": (width * head) ** -0.5, "wo": config["d_ff"] ** -0.5, "shared": 1.0}
    fresh = []
    for name, weight in named_weights(model).items():
        if weight.ndim == 2:
            scale = scales.get(name.split(".")[-2], width**-0.5)
            weight = mx.random.normal(weight.shape, scale=scale)
        fresh.append((name, weight))
    model.update(tree_unflatten(fresh))
    mx.eval(model.parameters())
    return model


def orient_heads(model: TrainedT5) -> None:
    """Let heads begin with a sense of order, which a table of biases takes long to learn.

    Heads of the encoder look at the next token, the one before, what follows and what precedes;
    two of the decoder at the token itself and the one before.
    """
    for stack, distances in (
        (model.encoder, ([1], [-1], range(1, MAX_LENGTH), range(-MAX_LENGTH, 0))),
        (model.decoder, ([0], [-1])),
    ):
        table = stack.bias_table
        for head, preferred in enumerate(distances):
            table.weight[stack.buckets(mx.array(list(preferred))), head] += FIRST_BIAS
        mx.eval(table.weight)


def save_model(model: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write the model as a folder of Hugging Face's form, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.astype(mx.bfloat16) for name, weight in named_weights(model).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    generation = {
        "decoder_start_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "max_length": MAX_LENGTH,
    }
    for name, content in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def load_model(folder: Path) -> TrainedT5:
    """Return a stored model, computing in float32."""
    model = TrainedT5(json.loads((folder / "config.json").read_text()))
    model.load_weights(str(folder / "model.safetensors"))
    model.set_dtype(mx.float32)
    return model
