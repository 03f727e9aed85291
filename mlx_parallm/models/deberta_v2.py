"""DeBERTa v2 and v3, which attend to content and to relative positions separately.

He et al., "DeBERTa: Decoding-enhanced BERT with disentangled attention" (2021, arXiv:2006.03654)
and "DeBERTaV3" (2023, arXiv:2111.09543). Names of parameters are those of Hugging Face's
checkpoints; the masked LM's head has two sets of names, and the older set is used here.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.bert_layers import (
    Attention,
    DenseActivation,
    Layer,
    activation,
    key_mask,
)
from mlx_parallm.models.checkpoint_names import Weights, without
from mlx_parallm.models.disentangled_attention import (
    DisentangledSelfAttention,
    RelativePositions,
    relative_buckets,
)
from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.models.heads import BertHeads, Predictions, Transform

HEAD = "cls.predictions."
NEWER_HEAD = "lm_predictions.lm_head."
KERNEL = "deberta.encoder.conv.conv.weight"


@dataclass
class ModelArgs(EncoderArgs):
    """The config of DeBERTa v2; defaults are Hugging Face's."""

    vocab_size: int = 128100
    hidden_size: int = 1536
    num_hidden_layers: int = 24
    num_attention_heads: int = 24
    intermediate_size: int = 6144
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    relative_attention: bool = False
    max_relative_positions: int = -1
    position_buckets: int = -1
    position_biased_input: bool = True
    pos_att_type: str | list[str] | None = None
    share_att_key: bool = False
    norm_rel_ebd: str = "none"
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"
    embedding_size: int | None = None
    pooler_hidden_act: str = "gelu"
    legacy: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.pos_att_type, str):
            self.pos_att_type = [part.strip() for part in self.pos_att_type.lower().split("|")]
        if self.max_relative_positions < 1:
            self.max_relative_positions = self.max_position_embeddings

    @property
    def span(self) -> int:
        """The span of relative positions, which are in ``-span .. span - 1``."""
        return self.position_buckets if self.position_buckets > 0 else self.max_relative_positions

    @property
    def table_size(self) -> int:
        """The dimensions of the table of word embeddings."""
        return self.embedding_size or self.hidden_size


def layer(args: ModelArgs) -> Layer:
    """Return a layer, which takes a mask and relative positions."""
    mixing = DisentangledSelfAttention(
        args.hidden_size,
        args.num_attention_heads,
        kinds=args.pos_att_type or (),
        relative=args.relative_attention,
        shares_projections=args.share_att_key,
    )
    return Layer(args, Attention(args, mixing))


class ConvLayer(nn.Module):
    """The convolution beside the first layer of v2-xlarge."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        dims, size = args.hidden_size, args.conv_kernel_size
        self.conv = nn.Conv1d(dims, dims, size, padding=(size - 1) // 2, groups=args.conv_groups)
        self.activation = activation(args.conv_act)
        self.LayerNorm = nn.LayerNorm(dims, eps=args.layer_norm_eps)

    def __call__(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        """Add the convolution of nearby tokens to each token.

        Args:
            embedded: the first layer's input, zero at padding and beyond a text's end.
            hidden: the first layer's output.
        """
        return self.LayerNorm(hidden + self.activation(self.conv(embedded)))


class Encoder(nn.Module):
    """A stack of layers and the relative positions that they share."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.layer = [layer(args) for _ in range(args.num_hidden_layers)]
        if args.relative_attention:
            self.rel_embeddings = nn.Embedding(2 * args.span, args.hidden_size)
            if "layer_norm" in args.norm_rel_ebd.lower():
                self.LayerNorm = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)
        if args.conv_kernel_size > 0:
            self.conv = ConvLayer(args)

    def __call__(self, hidden: mx.array, attention_mask: mx.array | None) -> mx.array:
        """Return the last hidden states."""
        embedded, mask = hidden, key_mask(attention_mask)
        positions = self._positions(hidden.shape[1]) if self.args.relative_attention else None
        for number, layer in enumerate(self.layer):
            hidden = layer(hidden, mask, positions)
            if number == 0 and "conv" in self:
                hidden = self.conv(embedded, hidden)
        return hidden

    def _positions(self, length: int) -> RelativePositions:
        args = self.args
        buckets = relative_buckets(length, args.position_buckets, args.max_relative_positions)
        # Every layer projects the whole table, so a short text uses only its middle.
        reach = min(args.span, int(buckets[-1]) + 1)
        table = self.rel_embeddings(mx.arange(args.span - reach, args.span + reach))
        if "LayerNorm" in self:
            table = self.LayerNorm(table)
        by_distance = np.concatenate([-buckets[:0:-1], buckets]) + reach
        steps = mx.arange(length)
        index = steps[:, None] - steps[None] + (length - 1)
        return RelativePositions(table, mx.array(by_distance.clip(0, 2 * reach - 1))[index])


class Embeddings(nn.Module):
    """Word embeddings the config's position and type embeddings, and a layer norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocab_size, args.table_size)
        if args.position_biased_input:
            self.position_embeddings = nn.Embedding(args.max_position_embeddings, args.table_size)
        if args.type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(args.type_vocab_size, args.table_size)
        if args.table_size != args.hidden_size:
            self.embed_proj = nn.Linear(args.table_size, args.hidden_size, bias=False)
        self.LayerNorm = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Embed int32 ``[batch, length]``; zeros at padding."""
        hidden = self.word_embeddings(input_ids)
        if "position_embeddings" in self:
            hidden = hidden + self.position_embeddings(mx.arange(input_ids.shape[1])[None])
        if "token_type_embeddings" in self:
            types = mx.zeros((1, 1), mx.int32) if token_type_ids is None else token_type_ids
            hidden = hidden + self.token_type_embeddings(types)
        if "embed_proj" in self:
            hidden = self.embed_proj(hidden)
        hidden = self.LayerNorm(hidden)
        if attention_mask is None:
            return hidden
        return hidden * attention_mask[..., None].astype(hidden.dtype)


class Trunk(nn.Module):
    """DeBERTa without its heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embeddings = Embeddings(args)
        self.encoder = Encoder(args)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids."""
        embedded = self.embeddings(input_ids, attention_mask, token_type_ids)
        return self.encoder(embedded, attention_mask)


class Model(BertHeads):
    """DeBERTa v2 or v3 with the head of its first architecture.

    The pooler of a classifier stands beside the trunk. Heads of other tasks are dropped: the
    released checkpoints have the generator's or the discriminator's head beside the trunk.
    """

    trunk_name = "deberta"
    trunk_parts = ("embeddings", "encoder")
    mlm_prefix = HEAD

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, Trunk(args), self._predictions)
        if args.head == "sequence":
            self.pooler = DenseActivation(
                args.hidden_size, args.hidden_size, activation(args.pooler_hidden_act)
            )

    def _predictions(self) -> Predictions:
        args, dims = self.args, self.args.table_size
        transform = Transform(
            args.hidden_size, dims, activation(args.hidden_act), eps=args.layer_norm_eps
        )
        return Predictions(transform, dims, args.vocab_size, tied=args.tie_word_embeddings)

    @property
    @override
    def has_pooler(self) -> bool:
        return "pooler" in self

    @override
    def pooled(self, hidden: mx.array) -> mx.array:
        return self.pooler(hidden[:, 0])

    @override
    def renamed(self, weights: Weights) -> Weights:
        weights = super().renamed(weights)
        weights = without(weights, "mask_predictions.", *self._unused(weights))
        weights = {self._older_name(name): array for name, array in weights.items()}
        if KERNEL in weights and weights[KERNEL].shape[1] != self.args.conv_kernel_size:
            # Torch stores [outputs, inputs, size]; MLX stores [outputs, size, inputs].
            weights[KERNEL] = weights[KERNEL].swapaxes(1, 2)
        return weights

    def _unused(self, weights: Weights) -> list[str]:
        """Return the prefixes of weights that this model does not use."""
        unused = [f"{part}." for part in ("pooler", "classifier") if part not in self]
        if not self.args.position_biased_input:
            unused.append("deberta.embeddings.position_embeddings.")
        if self.args.head != "masked_lm":
            return [*unused, HEAD, NEWER_HEAD]
        has_both = all(any(n.startswith(head) for n in weights) for head in (HEAD, NEWER_HEAD))
        return [*unused, NEWER_HEAD if self.args.legacy else HEAD] if has_both else unused

    @staticmethod
    def _older_name(name: str) -> str:
        if not name.startswith(NEWER_HEAD):
            return name
        part = name.removeprefix(NEWER_HEAD)
        return HEAD + (part if part == "bias" else f"transform.{part}")
