"""NomicBERT (Nussbaum et al., 2024, arXiv:2402.01613): BERT with rotary positions and SwiGLU.

Two formats of checkpoints load: that of nomic-embed-text-v1 and v1.5, whose config has GPT-2's
names (``n_embd``) and whose code came with the checkpoint, and transformers 5's own. Names of
parameters are those of the former.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.models.bert_layers import (
    Activation,
    AttentionMask,
    Embeddings,
    Pooler,
    activation,
    key_mask,
)
from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.models.heads import BertHeads, Predictions, Transform, uses_pooler
from mlx_parallm.models.rotary_layers import Rotary, attend_rotary, join_rows
from mlx_parallm.types.errors import ModelLoadError

#: ``OWN_NAMES``: parts of names in transformers 5's format, and their names here.
OWN_NAMES = {
    "nomic_bert.": "bert.",
    "embeddings.LayerNorm.": "emb_ln.",
    "self_attn.": "attn.",
    "attn.o_proj.": "attn.out_proj.",
    "mlp.up_proj.": "mlp.fc11.",
    "mlp.gate_proj.": "mlp.fc12.",
    "mlp.down_proj.": "mlp.fc2.",
    "post_attention_layernorm.": "norm1.",
    "post_mlp_layernorm.": "norm2.",
}

#: ``GATES``: the activation of the feed-forward part's gate, by ``activation_function``.
GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}

#: ``WIDTH_MULTIPLE``: in checkpoints with their own code, the feed-forward width is a multiple of
#: this.
WIDTH_MULTIPLE = 256


@dataclass
class ModelArgs(EncoderArgs):
    """The config of NomicBERT, in either format; defaults are Hugging Face's.

    The fields of the first part are transformers 5's. If ``n_embd`` is set, the second part counts.
    """

    vocab_size: int = 30528
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None

    n_embd: int | None = None
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    n_positions: int = 1024
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    pad_vocab_size_multiple: int = 1
    prenorm: bool = False
    causal: bool = False
    use_rms_norm: bool = False
    moe_every_n_layers: int = 0
    qkv_proj_bias: bool = True
    mlp_fc1_bias: bool = True
    mlp_fc2_bias: bool = True
    rotary_emb_base: float = 10_000.0
    rotary_emb_fraction: float = 0.0
    rotary_emb_interleaved: bool = False
    rotary_emb_scale_base: float | None = None
    rotary_scaling_factor: float | None = None
    max_trained_positions: int = 2048

    def __post_init__(self) -> None:
        if self.n_embd is None:
            self._read_rope_parameters()
        else:
            self._read_gpt2_names(self.n_embd)
        super().__post_init__()

    def _read_rope_parameters(self) -> None:
        settings = self.rope_parameters or {}
        kind = settings.get("rope_type", "default")
        if kind not in ("default", "dynamic"):
            raise ModelLoadError(f"rope_type {kind!r} is not supported for NomicBERT.")
        if kind == "dynamic":
            self.rotary_scaling_factor = float(settings["factor"])
            self.max_trained_positions = self.max_position_embeddings
        self.rotary_emb_base = float(settings.get("rope_theta", 1000.0))
        self.rotary_emb_fraction = 1.0
        self.qkv_proj_bias = self.mlp_fc1_bias = self.mlp_fc2_bias = False

    def _read_gpt2_names(self, dims: int) -> None:
        unsupported = ("prenorm", "causal", "use_rms_norm", "moe_every_n_layers")
        for name in (*unsupported, "rotary_emb_scale_base"):
            if value := getattr(self, name):
                raise ModelLoadError(f"{name} {value!r} is not supported for NomicBERT.")
        if self.activation_function not in GATES:
            raise ModelLoadError(
                f"activation_function {self.activation_function!r} is not "
                f"one of {', '.join(GATES)}."
            )
        if self.rotary_emb_fraction <= 0:
            raise ModelLoadError("rotary_emb_fraction is 0: only rotary positions are supported.")
        self.hidden_size, self.num_hidden_layers = dims, self.n_layer
        self.num_attention_heads = self.n_head
        self.intermediate_size = _round_up(self.n_inner or 8 * dims // 3, WIDTH_MULTIPLE)
        self.hidden_act = GATES[self.activation_function]
        self.max_position_embeddings = self.n_positions
        self.layer_norm_eps = self.layer_norm_epsilon
        self.vocab_size = _round_up(self.vocab_size, self.pad_vocab_size_multiple)

    def rotary(self, length: int, attention_mask: mx.array | None) -> Rotary:
        """Return the rotation of queries and keys.

        With ``rotary_scaling_factor``, theta grows with the length of each text that is longer
        than those of training (dynamic NTK). It uses the text's own length, not the batch's, so
        that a text has the same vectors in every batch.

        Args:
            length: tokens of the longest text.
            attention_mask: ``[B, L]``, 1 for tokens; None: no padding.
        """
        dims = int(self.hidden_size // self.num_attention_heads * self.rotary_emb_fraction)
        plain = Rotary(dims, self.rotary_emb_base, interleaved=self.rotary_emb_interleaved)
        factor, trained = self.rotary_scaling_factor, self.max_trained_positions
        if not factor or length <= trained:
            return plain
        lengths = mx.array([length]) if attention_mask is None else attention_mask.sum(axis=1)
        growth = mx.maximum(factor * lengths / trained - (factor - 1), 1.0)
        theta = self.rotary_emb_base * growth ** (dims / (dims - 2))
        waves = theta[:, None] ** (mx.arange(0, dims, 2) / dims)
        return replace(plain, wavelengths=waves)

    @property
    def gate(self) -> Activation:
        """The activation of the feed-forward part's gate."""
        return mx.sigmoid if self.hidden_act == "sigmoid" else activation(self.hidden_act)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Attention(nn.Module):
    """Attention with rotary positions and its output projection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        dims = args.hidden_size
        self.heads = args.num_attention_heads
        self.Wqkv = nn.Linear(dims, 3 * dims, bias=args.qkv_proj_bias)
        self.out_proj = nn.Linear(dims, dims, bias=args.qkv_proj_bias)

    def __call__(self, hidden: mx.array, mask: AttentionMask, rotary: Rotary) -> mx.array:
        """Mix the tokens that the mask allows."""
        return self.out_proj(attend_rotary(self.Wqkv(hidden), self.heads, rotary, mask))


class GatedMLP(nn.Module):
    """The feed-forward part: ``fc12`` gates ``fc11``."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        dims, width = args.hidden_size, args.intermediate_size
        self.fc11 = nn.Linear(dims, width, bias=args.mlp_fc1_bias)
        self.fc12 = nn.Linear(dims, width, bias=args.mlp_fc1_bias)
        self.fc2 = nn.Linear(width, dims, bias=args.mlp_fc2_bias)
        self.gate = args.gate

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return hidden states of the same shape."""
        return self.fc2(self.fc11(hidden) * self.gate(self.fc12(hidden)))


class Layer(nn.Module):
    """A transformer layer with norms after the residual connections."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attn = Attention(args)
        self.mlp = GatedMLP(args)
        self.norm1 = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)
        self.norm2 = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)

    def __call__(self, hidden: mx.array, mask: AttentionMask, rotary: Rotary) -> mx.array:
        """Return the hidden states after this layer."""
        hidden = self.norm1(hidden + self.attn(hidden, mask, rotary))
        return self.norm2(hidden + self.mlp(hidden))


class Encoder(nn.Module):
    """A stack of layers."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.layers = [Layer(args) for _ in range(args.num_hidden_layers)]

    def __call__(self, hidden: mx.array, mask: AttentionMask, rotary: Rotary) -> mx.array:
        """Return the last hidden states."""
        for layer in self.layers:
            hidden = layer(hidden, mask, rotary)
        return hidden


class Trunk(nn.Module):
    """NomicBERT without its heads."""

    def __init__(self, args: ModelArgs, *, pooler: bool) -> None:
        super().__init__()
        self.args = args
        self.embeddings = Embeddings(
            args.vocab_size,
            args.hidden_size,
            positions=0,
            token_types=args.type_vocab_size,
            eps=None,
        )
        self.emb_ln = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)
        self.encoder = Encoder(args)
        if pooler:
            self.pooler = Pooler(args.hidden_size)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids."""
        hidden = self.emb_ln(self.embeddings(input_ids, token_type_ids))
        rotary = self.args.rotary(input_ids.shape[1], attention_mask)
        return self.encoder(hidden, key_mask(attention_mask), rotary)


def _transform_activation(args: ModelArgs) -> str:
    """Return the activation's name; checkpoints with their own code have GELU or SiLU."""
    if args.n_embd is None:
        return args.hidden_act
    return "silu" if args.activation_function == "swiglu" else "gelu"


class Model(BertHeads):
    """NomicBERT with the head of its first architecture."""

    trunk_name = "bert"
    trunk_parts = ("embeddings", "emb_ln", "encoder", "layers", "pooler")

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, Trunk(args, pooler=uses_pooler(args)), self._predictions)

    def _predictions(self) -> Predictions:
        args, dims = self.args, self.args.hidden_size
        # Checkpoints with their own code have biases here if their feed-forward part has them;
        # those of transformers 5 always have.
        bias = args.n_embd is None or args.mlp_fc1_bias
        transform = Transform(
            dims,
            dims,
            activation(_transform_activation(args)),
            eps=args.layer_norm_eps,
            norm="layer_norm",
            bias=bias,
        )
        tied = args.tie_word_embeddings
        return Predictions(transform, dims, args.vocab_size, tied=tied, bias=bias)

    @override
    def renamed(self, weights: Weights) -> Weights:
        weights = super().renamed({_own_name(name): array for name, array in weights.items()})
        weights = {
            name.replace("bert.layers.", "bert.encoder.layers."): array
            for name, array in weights.items()
        }
        return join_rows(weights, ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.Wqkv")

    @override
    def unused(self) -> list[str]:
        return [*super().unused(), *(() if "classifier" in self else ("classifier.",))]


def _own_name(name: str) -> str:
    for part, own in OWN_NAMES.items():
        name = name.replace(part, own)
    return name
