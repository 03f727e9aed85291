"""The fields that bodies of trainers' routes share."""

from __future__ import annotations

from pydantic import Field, StrictStr

from mlx_parallm.api.turns.fields import QueueFields


class TrainerFields(QueueFields):
    """Which model or adapter is meant, and what the answer is called."""

    model: StrictStr | None = Field(
        None, description="A served model or adapter; default: the first model."
    )
    adapter: StrictStr | None = Field(
        None, description="An adapter, of the model if that is given."
    )
    request_id: StrictStr | None = Field(
        None, min_length=1, max_length=128, description="The answer's id; must be unique."
    )
