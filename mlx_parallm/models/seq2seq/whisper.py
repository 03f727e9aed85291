"""Whisper (Radford et al., 2022, arXiv:2212.04356): an encoder of sound, and BART's decoder.

Names of parameters are Hugging Face's. Folders of mlx-community may have OpenAI's names and the
layout of MLX's convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.seq2seq import bart
from mlx_parallm.models.seq2seq.interface import Arrays
from mlx_parallm.models.seq2seq.tables import HEAD, HEADS, one_table
from mlx_parallm.numerics.elementary import gelu
from mlx_parallm.types.model_input import LOG_MEL

FAMILY = bart.Family(
    norms_before=True, positions="table", has_bias=False, has_key_bias=False, is_one_length=True
)
#: ``KERNEL``: frames that a convolution sees at once.
KERNEL = 3
#: ``STRIDE``: frames of features for a position of the encoder.
STRIDE = 2
#: ``LONGEST``: the longest wavelength of the encoder's sinusoids over 2 pi.
LONGEST = 10000
POSITIONS = "model.encoder.embed_positions"
#: ``OPENAI_NAMES``: parts of OpenAI's names of parameters, and Hugging Face's.
OPENAI_NAMES = {
    "blocks": "layers",
    "attn": "self_attn",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn": "encoder_attn",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
    "mlp1": "fc1",
    "mlp2": "fc2",
    "mlp_ln": "final_layer_norm",
    "ln_post": "layer_norm",
    "ln": "layer_norm",
    "token_embedding": "embed_tokens",
    "positional_embedding": "embed_positions.weight",
}
#: ``OPENAI_MARK``: names that only OpenAI's folders have.
OPENAI_MARK = re.compile(r"(?:model\.)?decoder\.(?:token_embedding|blocks)\.")


@dataclass
class ModelArgs(bart.ModelArgs):
    """Fields of ``config.json``; sizes have transformers' defaults for Whisper.

    Attributes:
        num_mel_bins: numbers of a frame of features.
        max_source_positions: positions of the encoder, half as many as frames.
        max_target_positions: those of the decoder.
    """

    model_type: str = "whisper"
    vocab_size: int = 51865
    d_model: int = 384
    encoder_layers: int = 4
    decoder_layers: int = 4
    encoder_attention_heads: int = 6
    decoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1536
    decoder_ffn_dim: int = 1536
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448

    def __post_init__(self) -> None:
        """Fill in the decoder's positions; raise ValueError as ``bart.ModelArgs`` does."""
        self.max_position_embeddings = self.max_target_positions
        super().__post_init__()

    @property
    @override
    def family(self) -> bart.Family:
        return FAMILY

    @property
    @override
    def has_two_tables(self) -> bool:
        # The decoder has the only one.
        return True


class Encoder(nn.Module):
    """Two convolutions over time, positions, layers and a norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size = args.d_model
        self.conv1 = nn.Conv1d(args.num_mel_bins, size, KERNEL, padding=1)
        self.conv2 = nn.Conv1d(size, size, KERNEL, stride=STRIDE, padding=1)
        self.embed_positions = nn.Embedding(args.max_source_positions, size)
        self.layers = [bart.EncoderLayer(args) for _ in range(args.encoder_layers)]
        self.layer_norm = nn.LayerNorm(size)

    def embed(self, features: mx.array) -> mx.array:
        """Return the input of the first layer ``[B, S, E]`` for features ``[B, 2 S, mels]``."""
        x = gelu(self.conv1(features.astype(self.conv1.weight.dtype)))
        x = gelu(self.conv2(x))
        return x + self.embed_positions(mx.arange(x.shape[1])).astype(x.dtype)

    def finish(self, x: mx.array) -> mx.array:
        """Return the output of the last layer behind the norm."""
        return self.layer_norm(x)


class Trunk(nn.Module):
    """The model without its head."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.encoder = Encoder(args)
        layers = [bart.DecoderLayer(args) for _ in range(args.decoder_layers)]
        self.decoder = bart.Stack(args, layers, args.vocab_size)

    @property
    def target_table(self) -> nn.Embedding:
        """The word embeddings of decoder tokens."""
        return self.decoder.embed_tokens


class Model(bart.Model):
    """An encoder of log-mel features, a decoder, and the head of a language model.

    A source has the array ``LOG_MEL``, float32 ``[2 S, mels]`` for S positions.
    """

    def __init__(self, args: ModelArgs) -> None:
        nn.Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.max_source_len = args.max_source_positions
        self.model = Trunk(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.d_model, args.vocab_size, bias=False)

    @override
    def embed_sources(self, sources: Sequence[Arrays]) -> tuple[mx.array, list[int]]:
        x = self.model.encoder.embed(mx.stack([source[LOG_MEL] for source in sources]))
        return x.reshape(1, -1, x.shape[-1]), [x.shape[1]] * len(sources)

    def example_source(self, length: int) -> Arrays:
        """Return random features of so many positions, the same in every process."""
        shape = (STRIDE * length, self.args.num_mel_bins)
        features = np.random.RandomState(length).standard_normal(shape)
        return {LOG_MEL: mx.array(features.astype(np.float32))}

    @override
    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights by the names and layouts of this module."""
        is_openai = any(OPENAI_MARK.match(name) for name in weights)
        named = {_named(name, is_openai): array for name, array in weights.items()}
        named.pop("model.alignment_heads", None)
        if f"{POSITIONS}.weight" not in named:
            table = mx.array(sinusoids(self.args)).astype(_dtype_of(named))
            named[f"{POSITIONS}.weight"] = table
        for name, channels in (("conv1", self.args.num_mel_bins), ("conv2", self.args.d_model)):
            key = f"model.encoder.{name}.weight"
            # torch has the channels before the frames of the kernel.
            if key in named and named[key].shape[1:] == (channels, KERNEL):
                named[key] = named[key].swapaxes(1, 2)
        copies = [HEAD] if self.args.tie_word_embeddings else []
        return one_table(named, "model.decoder.embed_tokens", copies)


def _named(name: str, is_openai: bool) -> str:
    """Return the name of a parameter in this module."""
    name = name.removeprefix("model.")
    if is_openai:
        name = ".".join(OPENAI_NAMES.get(part, part) for part in name.split("."))
    module, _, part = name.partition(".")
    return f"{HEAD}.{part}" if module in HEADS else f"model.{name}"


def sinusoids(args: ModelArgs) -> np.ndarray:
    """Return the positions ``[S, E]`` of the encoder: sines, then cosines."""
    half = args.d_model // 2
    step = np.log(LONGEST) / (half - 1)
    frequencies = np.exp(-step * np.arange(half))
    angles = np.arange(args.max_source_positions)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _dtype_of(named: Mapping[str, Any]) -> mx.Dtype:
    bias: mx.array | None = named.get("model.encoder.conv1.bias")
    return mx.float32 if bias is None else bias.dtype
