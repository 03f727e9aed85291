"""The text half of LLaVA-NeXT, which mlx_lm lacks: that of its LLaVA."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import mistral3

#: ``NEWLINE``: the mark behind a row of patches, a weight of the tower.
NEWLINE = "image_newline"
ModelArgs = mistral3.ModelArgs


class Model(mistral3.Model):
    """A Mistral or Llama with the interface of mlx_lm's vision-language models."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the text model's weights by mlx_lm's names; the tower's are left out."""
        return super().sanitize(
            {name: array for name, array in weights.items() if not name.endswith(NEWLINE)}
        )
