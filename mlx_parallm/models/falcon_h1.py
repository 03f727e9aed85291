"""mlx_lm's Falcon-H1, with all multipliers of transformers.

mlx_lm multiplies weights once, when they are loaded. It leaves out ``key_multiplier``, and the
factors of values and biases.
"""

from __future__ import annotations

import logging

import mlx.core as mx
from mlx_lm.models import falcon_h1

from mlx_parallm.models.checkpoint_names import Weights

logger = logging.getLogger(__name__)

ModelArgs = falcon_h1.ModelArgs


class Model(falcon_h1.Model):
    """mlx_lm's model."""

    args: ModelArgs

    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights, multiplied if they have transformers' form."""
        read: Weights = super().sanitize(weights)
        args = self.args
        if read is weights:
            if (args.key_multiplier, args.attention_in_multiplier) != (1, 1):
                logger.warning(
                    "Weights that mlx_lm converted lack key_multiplier in keys and "
                    "attention_in_multiplier in values: serve transformers' folder instead."
                )
            return read
        factors = self._left_out()
        return {
            name: array * factors[part].astype(array.dtype)
            if (part := ".".join(name.split(".")[-2:])) in factors
            else array
            for name, array in read.items()
        }

    def _left_out(self) -> dict[str, mx.array]:
        """Return factors that mlx_lm leaves out, by the last two parts of weights' names."""
        args = self.args
        gate, down = args.mlp_multipliers
        factors = {
            "k_proj.weight": args.key_multiplier,
            "k_proj.bias": args.key_multiplier,
            "v_proj.weight": args.attention_in_multiplier,
            "o_proj.bias": args.attention_out_multiplier,
            "gate_proj.bias": gate,
            "down_proj.bias": down,
            "out_proj.bias": args.ssm_out_multiplier,
        }
        arrays = {name: mx.array(factor) for name, factor in factors.items()}
        return {**arrays, "in_proj.bias": self.model._mup_vector}
