"""Scores of texts for queries by the vectors of their tokens: MaxSim.

ColBERT (Khattab & Zaharia 2020, https://arxiv.org/abs/2004.12832), equation 3: for each token of a
query the largest cosine with a token of the document, summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from mlx_parallm.api.pooling.inputs.encode import Reading, Role, prompt_of_type, single_inputs
from mlx_parallm.api.pooling.vectors.arrays import unit_vectors
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.pooling import LateInteraction, PoolingInput

Side = Literal["query", "document"]


async def side_inputs(
    texts: Sequence[str], model: PoolingModel, side: Side, reading: Reading
) -> tuple[PoolingInput, ...]:
    """Return inputs of queries or documents, as the model's files say; see ``single_inputs``."""
    late = model.info.late or LateInteraction()
    is_query = side == "query"
    role = Role(
        prompt=prompt_of_type(model.info, side),
        marker=late.query_prefix if is_query else late.document_prefix,
        longest=late.query_length if is_query else late.document_length,
    )
    inputs = await single_inputs(texts, model, "token_embed", reading, role=role)
    if not is_query:
        return inputs
    return tuple(_expanded(each, late, model.info.max_model_len) for each in inputs)


def side_vectors(
    encoded: PoolingInput, vectors: np.ndarray, side: Side, late: LateInteraction
) -> np.ndarray:
    """Return the vectors of a query or document that are compared; see ``compared``."""
    skips = side == "document" or late.skips_in_queries
    return compared(encoded, vectors, late.skipped_ids if skips else frozenset())


def compared(encoded: PoolingInput, vectors: np.ndarray, skipped_ids: frozenset[int]) -> np.ndarray:
    """Return the unit vectors of an input's tokens that are not skipped, ``[tokens, dims]``."""
    if skipped_ids:
        vectors = vectors[[token not in skipped_ids for token in encoded.token_ids]]
    return unit_vectors(vectors)


def max_sim(query: np.ndarray, document: np.ndarray, *, is_mean: bool = False) -> float:
    """Return the sum or the mean of each query token's largest cosine; 0 if there is none."""
    if not len(query) or not len(document):
        return 0.0
    best = (query @ document.T).max(axis=1)
    return float(best.mean() if is_mean else best.sum())


def _expanded(query: PoolingInput, late: LateInteraction, longest: int) -> PoolingInput:
    missing = min(late.expands_to, longest) - len(query.token_ids)
    if missing <= 0 or late.expansion_id is None:
        return query
    return replace(
        query,
        token_ids=(*query.token_ids, *(late.expansion_id,) * missing),
        num_unattended=0 if late.attends_to_expansion else missing,
    )
