"""GPT-2 of mlx_lm, for checkpoints as transformers writes them today.

mlx_lm reads the first checkpoints, which are of the bare model. Later ones have the prefix
``transformer.``, maybe the tied head, and no ``n_ctx`` in their config. Two fields of it change the
scale of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_lm.models import gpt2

from mlx_parallm.models.checkpoint_names import Weights, without

#: ``BUFFERS``: endings of the names of attention's constants.
BUFFERS = (".attn.bias", ".attn.masked_bias")


@dataclass(kw_only=True)
class ModelArgs(gpt2.ModelArgs):
    """Fields of ``config.json``; ``n_ctx`` is not used, so it may be missing."""

    n_ctx: int = 0
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class Model(gpt2.Model):
    """mlx_lm's model."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        for number, layer in enumerate(self.layers, 1):
            if not args.scale_attn_weights:
                layer.attn.scale = 1.0
            if args.scale_attn_by_inverse_layer_idx:
                layer.attn.scale /= number

    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights by the names of mlx_lm's modules."""
        bare = {
            name.removeprefix("transformer."): array
            for name, array in without(weights, "lm_head.").items()
            if not name.endswith(BUFFERS)
        }
        return super().sanitize(bare)
