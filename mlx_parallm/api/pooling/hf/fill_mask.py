"""Fill-mask: the likeliest tokens at each mask of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mlx_parallm.api.pooling.encoded import ModelCall
from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.mlm.fill_mask import fillings
from mlx_parallm.api.pooling.mlm.inputs import candidates_of, masked_inputs
from mlx_parallm.types.pooling import PoolingInput, Task

TOP_K = 5


async def fill_mask(job: Job) -> Any:
    """Return the fillings of a text; a list for each mask if it has several, and for each text.

    Raises:
        ParallmError: see ``filled``.
    """
    parameters = job.parameters
    top_k, targets = parameters.top_k or TOP_K, parameters.targets
    answers, warnings = await filled(
        job.call, job.texts(), job.reading, top_k=top_k, targets=targets
    )
    job.warnings.extend(warnings)
    # transformers answers a list of one text as it does the text alone.
    return answers[0] if len(answers) == 1 else answers


async def filled(
    call: ModelCall,
    texts: Sequence[str],
    reading: Reading,
    *,
    top_k: int,
    targets: Iterable[str] | None,
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the fillings of each text, a list for each mask if it has several, and warnings.

    Args:
        call: a call of a masked LM.
        texts: texts with masks.
        reading: how the request has them read.
        top_k: number of fillings of a mask.
        targets: words to choose among; None: the whole vocabulary.

    Raises:
        ParallmError: see ``masked_inputs``, ``candidates_of`` and ``ModelCall.written``.
    """
    model = call.model
    words = await candidates_of(targets, model, "targets")
    task: Task = "mlm_logprobs" if words.ids else "mlm_top"
    inputs = await masked_inputs(texts, model, task, reading, words.ids, top_k=top_k)

    def write(text: PoolingInput, result: np.ndarray) -> list[Any]:
        masks = fillings(text, result, top_k, model)
        return masks[0] if len(masks) == 1 else masks

    answers, _ = await call.written(inputs, write)
    return answers, words.warnings
