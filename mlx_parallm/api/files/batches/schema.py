"""The body of ``POST /v1/batches``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictStr

from mlx_parallm.api.files.schema import ExpiresAfter
from mlx_parallm.api.http.forms import Metadata, NullIsAbsent


class BatchRequest(NullIsAbsent):
    """A file of requests to be answered in the background."""

    input_file_id: StrictStr = Field(description="A file of the purpose batch.")
    endpoint: StrictStr = Field(description="The path of every line's url.")
    completion_window: Literal["24h"] = Field(description="When the batch expires.")
    metadata: Metadata | None = Field(None, description="Kept with the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When output and error file expire; by default they stay."
    )
