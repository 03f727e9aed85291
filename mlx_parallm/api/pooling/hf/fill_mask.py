"""Fill-mask: the likeliest tokens at each mask of a text."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.api.pooling.encoded import encoded
from mlx_parallm.api.pooling.hf.job import Done, Job
from mlx_parallm.api.pooling.hf.texts import cut_to, cuts_left, texts_of
from mlx_parallm.api.pooling.mlm.fill_mask import fillings, kept_top_k
from mlx_parallm.api.pooling.mlm.inputs import Candidates, candidates_of, masked_inputs
from mlx_parallm.types.pooling import EncodeInput

TOP_K = 5


async def fill_mask(job: Job) -> Done:
    """A list of fillings for a text; a list for each mask if it has several, and for each text.

    Raises:
        ParallmError: see ``masked_inputs``, ``candidates_of`` and ``encoded``.
    """
    texts = texts_of(job.inputs)
    words = Candidates()
    if job.parameters.targets is not None:
        words = await candidates_of(job.parameters.targets, job.model, "targets")
    top_k = job.parameters.top_k or TOP_K
    inputs = await masked_inputs(
        texts,
        job.model,
        "mlm_logprobs" if words.ids else "mlm_top",
        words.ids,
        top_k=0 if words.ids else kept_top_k(top_k, job.model),
        truncate=cut_to(job.parameters),
        from_left=cuts_left(job.parameters),
        param="inputs",
    )

    def write(one: EncodeInput, result: np.ndarray) -> list[Any]:
        masks = fillings(one, result, top_k, job.model)
        return masks[0] if len(masks) == 1 else masks

    found, _ = await encoded(job.engine.encoders, job.model, inputs, job.request_id, write)
    # transformers does not tell a list of one text from the text.
    return Done(found[0] if len(found) == 1 else found, words.warnings)
