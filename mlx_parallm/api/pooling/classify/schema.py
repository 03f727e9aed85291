"""The bodies of the routes that classify texts."""

from __future__ import annotations

from pydantic import Field, StrictBool

from mlx_parallm.api.pooling.inputs.schema import TextsRequest


class ClassifyRequest(TextsRequest):
    """vLLM's ``POST /classify``."""

    use_activation: StrictBool | None = Field(
        None, description="False: the logits in place of probabilities."
    )
